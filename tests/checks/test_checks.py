"""Every check of every lesson: right answers pass, and each wrong one is seen.

Of an exercise that is a Spec, the list of mistakes is itself the test (audit.py); tests/answers
holds right answers, and wrong ones that are no slip of the truth, with the words that their verdict
must hold, or "".

Checks draw their cases. Tests take the same draws each time, and others each night;
`MANYHANDS_DRAW=7 pytest tests/checks/test_checks.py` takes those of 7.
"""

import ast
import datetime
import importlib
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import answers
import units
from audit import Audit
from manyhands.checkpoint import asynchronous
from manyhands.checks import score
from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.card import NotYet, Verdict
from manyhands.checks.engine.exercise import judge
from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.engine.mistakes import sources_of
from manyhands.checks.engine.spec import Spec
from manyhands.data_parallel import replicas as data_parallel
from manyhands.ddp import wrapping
from manyhands.fsdp import flat
from manyhands.jobs.alike import difference
from manyhands.memory import savings
from manyhands.pipeline import bubble
from manyhands.saving import store

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.stem for path in (ROOT / "tests" / "answers").glob("[a-z]*.py"))


MOST_MISTAKES = 15  # of an exercise; the slips that any function can have come by themselves
MOST_WRONG = 6  # answers that are no slip of the truth, besides those once accepted
NIGHTLY = bool(os.environ.get("MANYHANDS_NIGHTLY"))
DRAW = os.environ.get("MANYHANDS_DRAW", str(datetime.date.today()) if NIGHTLY else "1")
TEXTS = ("0.4", "0.6")  # read by rules of their own, and each rule needs a text that breaks it


def exercises_of(word: str) -> dict:
    return importlib.import_module(f"manyhands.checks.{word}").lesson.exercises


def every_exercise() -> list:
    return [pytest.param(word, todo, id=todo) for word in LESSONS for todo in exercises_of(word)]


def draw() -> None:
    """Start with the draws of DRAW."""
    random.seed(DRAW)
    torch.manual_seed(random.randrange(1 << 40))


def verdict(word: str, todo: str, answer: object):
    draw()
    lesson = importlib.import_module(f"manyhands.checks.{word}").lesson
    return judge(lesson.exercises[todo], answer)


def test_every_lesson_has_answers():
    folder = ROOT / "scripts/manyhands/checks"
    lessons = {path.stem for path in folder.glob("[a-z]*.py")}
    lessons |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert lessons - {"shared", "engine"} == set(LESSONS)


@pytest.mark.parametrize("word", LESSONS)
def test_every_exercise_has_answers_mistakes_and_hints_and_no_list_regrows(word):
    exercises = exercises_of(word)
    rights = answers.right(word)
    wrongs = answers.wrong(word, once_accepted=False)
    assert set(rights) == set(exercises)
    for todo, exercise in exercises.items():
        assert len(rights[todo]) >= 2, todo
        assert len(exercise.hints) >= 2, todo
        if exercise.spec is None:
            assert len(wrongs[todo]) >= 4, todo
        else:
            assert 3 <= len(exercise.spec.mistakes) <= MOST_MISTAKES, todo
            assert todo in TEXTS or len(wrongs.get(todo, ())) <= MOST_WRONG, todo


def holders(word: str, spec: Spec) -> set[Path]:
    """The files of the lesson's modules that have this spec under a name of their own."""
    package = f"manyhands.checks.{word}."
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    return {Path(m.__file__) for m in modules if any(one is spec for one in vars(m).values())}


def test_each_spec_stands_in_the_file_that_is_found_for_it():
    specs = {todo: (word, one.spec) for word in LESSONS for todo, one in exercises_of(word).items()}
    found = units.specs(units.Course(ROOT))
    assert set(found) == set(specs)
    for todo, (word, spec) in specs.items():
        assert holders(word, spec) == {ROOT / found[todo]}, todo


def functions_of(truth: object) -> dict[str, str]:
    """Name -> source of each function, and of each method as `Class.method`."""
    found = {}
    for source in sources_of(truth):
        top = ast.parse(source).body[0]
        inner = top.body if isinstance(top, ast.ClassDef) else []
        found[top.name] = source
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                found[f"{top.name}.{one.name}"] = ast.get_source_segment(source, one)
    return found


OPEN = re.compile(r'exercise="([^"]+)" todo="([\d.]+)"')


def test_each_mistake_is_in_what_the_notebook_leaves_to_write():
    """A learner cannot make another one, and what is left to write cannot be what is given."""
    pages = [path.read_text() for path in (ROOT / "solutions").glob("*.py")]
    left = {todo: names.split() for text in pages for names, todo in OPEN.findall(text)}
    specs = {todo: one.spec for word in LESSONS for todo, one in exercises_of(word).items()}
    assert set(left) == set(specs)
    for todo, spec in specs.items():
        functions = functions_of(spec.truth)
        sources = [functions[name] for name in left[todo] if name in functions]
        for mistake in spec.mistakes:
            texts = [old.rstrip() for old, _ in mistake.change.patches]
            is_there = any(text in source for text in texts for source in sources)
            assert is_there or not texts, (todo, left[todo], mistake.why)


def as_asked(word: str, todo: str, answer: object) -> object:
    """The answer, or twice the same where two are asked for."""
    return Pair(answer, answer) if exercises_of(word)[todo].num_answers == 2 else answer


class Entry(NamedTuple):
    """An answer, the state of its verdict, and words that the verdict must hold."""

    answer: object
    state: str
    words: str

    def complaint(self, verdict: Verdict) -> str:
        """What is wrong with its verdict, or ""."""
        said = repr(verdict)
        is_clean = not any(text in said for text in ("\n", "checks/", "Traceback"))
        if verdict.state != self.state or self.words not in said or not is_clean:
            name = getattr(self.answer, "__name__", self.answer)
            return f"{name}, {self.state}, {self.words!r}: {said}"
        if self.state == "not yet" and not verdict.seen:
            return f"{self.answer} is refused without a word"
        if self.state == "not started" and said != self.words:
            return f"more is said of a stub than {self.words!r}: {said}"
        return ""


def entries_of(word: str, todo: str) -> list[Entry]:
    """The answers to an exercise; a stub ends the ranks, and so comes last."""

    def stub(*args, **kwargs):
        raise NotImplementedError(f"TODO {todo}")

    entries = [Entry(answer, "done", "") for answer in answers.right(word)[todo]]
    wrongs = answers.wrong(word).get(todo, ())
    entries += [Entry(answer, "not yet", words) for answer, words in wrongs]
    if NIGHTLY or todo == next(iter(exercises_of(word))):
        nonsense = {5: "", None: "", returns_none: "", int: "", misspelt: "NameError"}
        entries += [Entry(as_asked(word, todo, a), "not yet", w) for a, w in nonsense.items()]
    stub = as_asked(word, todo, stub)
    return [*entries, Entry(stub, "not started", f"TODO {todo} not started")]


def returns_none(*args, **kwargs):
    return None


def misspelt(*args, **kwargs):
    return no_such_name  # noqa: F821


@pytest.mark.parametrize(("word", "todo"), every_exercise())
def test_an_exercise(word, todo):
    """Its mistakes are named, right answers done, wrong ones told, and a stub is not started.

    A slip is tried only on an answer of which a slip's words are expected; at night on all.
    """
    entries = entries_of(word, todo)
    draw()
    audit = Audit(exercises_of(word)[todo], [entry.answer for entry in entries])
    complaints = audit.of_mistakes()
    slips = [NIGHTLY or audit.is_of_slips(entry.words) for entry in entries]
    pairs = zip(entries, audit.verdicts(slips), strict=True)
    complaints += [words for entry, verdict in pairs if (words := entry.complaint(verdict))]
    assert not complaints, "\n".join([f"MANYHANDS_DRAW={DRAW}", *complaints])


class HalfWritten(data_parallel.BucketSender):
    """One of its two methods is still as the notebook gives it."""

    def _start(self, index):
        raise NotImplementedError("TODO 5.10")


def test_methods_that_are_still_to_be_written_are_named():
    told = verdict("data_parallel", "5.10", HalfWritten)
    assert told.state == "not started"
    assert repr(told) == "TODO 5.10 not started: _start is still to be written"


class HalfAFunction(savings.Checkpoint):
    """Static methods, of which one is still as the notebook gives it."""

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("TODO 9.6")


def test_static_methods_that_are_still_to_be_written_are_named():
    told = verdict("memory", "9.6", HalfAFunction)
    assert repr(told) == "TODO 9.6 not started: backward is still to be written"


class BareFlat(flat.ShardedFlat):
    def __init__(self, params, dtype=None, replicas=None, group=None):
        raise NotImplementedError("TODO 10.1")


class OnABareFlat(BareFlat):
    def wait(self):
        self.start()


class BareOnABareFlat(BareFlat):
    def wait(self):
        raise NotImplementedError("TODO 10.4")


def test_a_class_on_a_stub_is_not_started_until_it_is_written():
    assert verdict("fsdp", "10.4", BareOnABareFlat).state == "not started"
    told = verdict("fsdp", "10.4", OnABareFlat)
    assert "calls your `__init__`, TODO 10.1, which is not written yet" in repr(told)


def test_an_autograd_function_written_twice_is_the_same():
    def write(factor):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return factor * x

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        return Twice

    def other():
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x + x + x

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad

        return Twice

    assert not difference("f", write(2), write(2)) and difference("f", write(2), other())


def test_an_endless_loop_ends():
    def forever(*args, **kwargs):
        while True:
            pass

    told = verdict("ddp", "6.1", forever)
    assert "never ended" in repr(told) and "forever" in repr(told)


def test_words_of_an_error_explain_no_line_in_which_a_rank_waits():
    def receives(tensor, root=0, group=None):
        if dist.get_rank(group) != root:
            dist.recv(tensor.contiguous(), dist.get_global_rank(group or dist.group.WORLD, root))

    assert "contiguous" in exercises_of("collectives")["4.2"].spec.reasons
    told = verdict("collectives", "4.2", receives)
    assert "tensor.contiguous()" in told.seen and told.why == "All ranks that are left wait."


def test_an_endless_loop_without_ranks_is_told_without_words_of_messages(monkeypatch):
    def forever(*args):
        while True:
            pass

    monkeypatch.setattr(exercises_of("first_job")["0.5"].spec, "limit_s", 1.0)
    told = repr(verdict("first_job", "0.5", forever))
    assert "never ended: it is still in line" in told and "What ends the loop" in told
    assert "rank" not in told and "message" not in told


class SlowToRead(dict):
    """Buffers that make the check wait after the first save, as a machine that stands still."""

    was_read = False

    def items(self):
        if not self.was_read:
            time.sleep(0.8)
        self.was_read = True
        return super().items()


class InSlowTraining(asynchronous.AsyncSaver):
    """Right."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = SlowToRead()


class LiveInSlowTraining(InSlowTraining):
    """Wrong: nothing is copied."""

    def copied(self, name, tensor):
        return tensor


def test_a_machine_that_stands_still_hides_no_live_tensor_and_refuses_no_copy():
    assert verdict("checkpoint", "11.7", InSlowTraining).state == "done"
    assert "checkpoint 1" in repr(verdict("checkpoint", "11.7", LiveInSlowTraining))


def test_what_an_answer_writes_under_a_relative_name_does_not_stay(tmp_path, monkeypatch):
    def swapped(path, fill):
        with open(f"{fill.__name__}.partial", "wb") as file:
            return file.write(b"in the wrong folder")

    monkeypatch.chdir(tmp_path)
    assert verdict("checkpoint", "11.3", swapped).state == "not yet"
    assert not list(tmp_path.iterdir())


def test_an_answer_that_leaves_the_working_folder_changed_is_told():
    def walks(path, fill):
        num_bytes = store.write_whole(path, fill)
        os.chdir("/")
        return num_bytes

    assert "left the working folder changed" in repr(verdict("checkpoint", "11.3", walks))


AS_IN_A_KERNEL = """
import sys
sys.path[0] = ""  # as Jupyter has it: the working folder
from manyhands.checks import checkpoint as check

def write_whole(path, fill):
    import beside_the_notebook
    return beside_the_notebook.write(path, fill)

check.write_whole(write_whole)
"""


def test_an_answer_can_import_a_module_beside_the_notebook(tmp_path):
    text = "from manyhands.saving.store import write_whole as write\n"
    (tmp_path / "beside_the_notebook.py").write_text(text)
    (tmp_path / "kernel.py").write_text(AS_IN_A_KERNEL)
    command = [sys.executable, "kernel.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "TODO 11.3 done" in ended.stdout


def test_an_error_without_ranks_is_told_with_its_call():
    def hours(busy, num_granted, seconds):
        means = [sum(samples) / len(samples) for samples in busy]
        return num_granted * seconds / 3600, sum(means) * seconds / 3600

    told = repr(verdict("first_job", "0.5", hours))
    assert "raised ZeroDivisionError: division by zero" in told and "device_hours(" in told
    assert "rank 0" not in told


def test_a_raise_that_was_left_below_the_code_is_named():
    def hours(busy, num_granted, seconds):
        found = num_granted * seconds / 3600
        raise NotImplementedError(f"TODO 0.5 {found}")

    told = verdict("first_job", "0.5", hours)
    assert told.state == "not started" and "`raise NotImplementedError` still stands" in repr(told)


def test_a_check_without_its_answer_is_told():
    check = importlib.import_module("manyhands.checks.first_job")
    with pytest.raises(NotYet, match="hand over device_hours itself"):
        check.device_hours()
    with pytest.raises(NotYet, match="takes one answer, and was given 2"):
        check.device_hours(int, int)


def test_an_exercise_of_two_answers_wants_both_and_keeps_both(tmp_path, capsys):
    check = importlib.import_module("manyhands.checks.pipeline")
    with pytest.raises(NotYet, match="takes two answers, in the order of their cell, and was"):
        check.bubble(bubble.idle_share)
    with pytest.raises(NotYet, match="bubble is None, not a function"):
        check.bubble(bubble.idle_share, None)
    check.bubble(bubble.idle_share, bubble.bubble)
    check.keep(tmp_path)
    text = (tmp_path / "pipeline.py").read_text()
    assert "\ndef idle_share(" in text and "\ndef bubble(" in text


# ---- what a learner meets around the verdicts ------------------------------------------------


def mean_by_calling_the_course(total, count, group=None):
    return wrapping.mean_over_ranks(total, count, group)


def mean_by_importing_the_course(total, count, group=None):
    from manyhands.ddp.wrapping import mean_over_ranks

    return mean_over_ranks(total, count, group)


def mean_of_ones_own(total, count, group=None):
    pairs = [None] * dist.get_world_size(group)
    dist.all_gather_object(pairs, (total.item(), count), group=group)
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


def not_started(total, count, group=None):
    raise NotImplementedError("TODO 6.5")


def test_graded_work_is_written_in_the_notebook(monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    for answer in (
        wrapping.mean_over_ranks,
        mean_by_calling_the_course,
        mean_by_importing_the_course,
    ):
        assert "comes from the manyhands package" in repr(verdict("ddp", "6.5", answer))
    assert verdict("ddp", "6.5", mean_of_ones_own).state == "done"
    check = importlib.import_module("manyhands.checks.ddp")
    with pytest.raises(NotYet, match="TODO 6.5 not started"):
        check.mean_over_ranks(not_started)


def test_reading_on_is_free_and_a_mistake_stops(capsys):
    check = importlib.import_module("manyhands.checks.ddp")
    check.mean_over_ranks(not_started)
    assert capsys.readouterr().out == "TODO 6.5 not started\n"
    assert not check.ready("6.5") and "waits for TODO 6.5" in capsys.readouterr().out
    with pytest.raises(NotYet) as caught:
        check.mean_over_ranks(lambda total, count, group=None: total.item())
    assert caught.value._render_traceback_() == ["TODO 6.5 not yet: the card above says why"]
    assert "\n" not in str(caught.value)
    check.mean_over_ranks(mean_of_ones_own)
    assert check.ready("6.5") and check.ready(6.5)


def test_hints_come_one_at_a_time(capsys):
    check = importlib.import_module("manyhands.checks.ddp")
    for number in (1, 2, 3, 3):
        check.hint(6.7)
        assert capsys.readouterr().out.count("Hint ") == number
    check.hint("7.1")
    assert "There is no TODO 7.1 here" in capsys.readouterr().out


def test_keep_writes_what_passed_and_nothing_else(tmp_path, capsys):
    lesson = Lesson("demo")
    lesson.add(exercises_of("ddp")["6.5"].spec)
    lesson.keep(tmp_path / "mine")
    assert "nothing to write" in capsys.readouterr().out and not (tmp_path / "mine").exists()


def test_the_card_says_the_same_and_escapes(capsys):
    told = Verdict("6.5", "mean", "not yet", "<b>seen</b>", "why", "hint")
    assert repr(told) == "TODO 6.5 not yet: <b>seen</b> - why - hint"
    assert "&lt;b&gt;seen&lt;/b&gt;" in told._repr_html_()
    score("bytes", "many", 8, 8.0, "bytes")
    score("bytes", None, 8, 2.5)
    assert capsys.readouterr().out.splitlines() == [
        "bytes: you said 'many', which is no number, expected 8, measured 8 bytes",
        "bytes: no prediction, expected 8, measured 2.5",
    ]
