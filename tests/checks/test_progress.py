"""What a person has done outlasts kernels, and lies with the person; help when one is stuck."""

import importlib
import json
import multiprocessing
import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from manyhands.checks.engine import overview, progress
from manyhands.checks.engine.card import NotYet
from manyhands.checks.engine.lesson import Lesson
from manyhands.data import corpus
from manyhands.jobs import mine, submit
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks
from manyhands.training import places, storage

CHECKS = importlib.import_module("manyhands.checks.gradient_descent").lesson
TODO = next(iter(CHECKS.exercises))
SPEC = CHECKS.exercises[TODO].spec
NAME = SPEC.names[0]
FORK = multiprocessing.get_context("fork")


def wrong(*args: object, **kwargs: object) -> None:
    """No answer at all."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's own folder, and a notebook's folder as the current one."""
    for name in ("HOME", "RUNS", "MINE", "PROGRESS"):
        monkeypatch.delenv(f"MANYHANDS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "notebook").mkdir()
    monkeypatch.chdir(tmp_path / "notebook")
    return tmp_path / "home"


@pytest.fixture
def lesson() -> Lesson:
    """A kernel's lesson, of which nothing was checked yet."""
    return new_lesson()


def new_lesson() -> Lesson:
    found = Lesson("gradient_descent")
    found.run = found.add(SPEC)  # what the notebook calls check.NAME
    return found


def check(lesson: Lesson, answer: object) -> None:
    try:
        lesson.run(answer)
    except NotYet as error:
        assert "not yet" in str(error)


# ---- tries ----------------------------------------------------------------------------------


def test_tries_count_up_to_the_first_green_one_and_are_known_in_another_kernel(lesson, home):
    for answer in (wrong, SPEC.truth, wrong):
        check(lesson, answer)
    assert progress.standings("gradient_descent") == {NAME: progress.Standing(2, True, False)}
    path = home / "manyhands-work/progress/gradient_descent.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [json.loads(one)["state"] for one in path.read_text().splitlines()] == [
        "not yet",
        "done",
    ]


def test_a_stub_is_no_try(lesson):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"TODO {TODO}")

    check(lesson, stub)
    assert progress.standings("gradient_descent") == {}


def test_lines_that_cannot_be_read_are_passed_over(lesson, home):
    check(lesson, wrong)
    path = home / "manyhands-work/progress/gradient_descent.jsonl"
    path.write_bytes(path.read_bytes() + b'[1]\n{"exercise": 3}\n\xff\n{"exercise": "cut')
    assert progress.standings("gradient_descent")[NAME].tries == 1


@pytest.mark.parametrize("where", ("marking", "solutions"))
def test_neither_marking_nor_a_solution_counts_as_done(lesson, where, monkeypatch, tmp_path):
    if where == "marking":
        monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    else:
        (tmp_path / "solutions").mkdir()
        monkeypatch.chdir(tmp_path / "solutions")
    progress.note("gradient_descent", NAME, "done")
    assert progress.standings("gradient_descent") == {}


def test_progress_that_cannot_be_kept_costs_a_line_and_no_verdict(lesson, capsys, monkeypatch):
    monkeypatch.setenv("MANYHANDS_PROGRESS", "/dev/null/progress")
    check(lesson, wrong)
    check(lesson, SPEC.truth)
    assert lesson.done(TODO)
    told = [one for one in capsys.readouterr().out.splitlines() if "cannot be kept" in one]
    assert len(told) == 1 and "Not a directory" in told[0] and "set MANYHANDS_HOME" in told[0]


def many(lesson: str, number: int) -> None:
    for at in range(50):
        progress.note(lesson, f"exercise-{number}-{at}", "not yet", "x" * 300)


def test_notebooks_at_once_do_not_mix_their_lines():
    starts = [FORK.Process(target=many, args=("ddp", number)) for number in (1, 2)]
    for one in starts:
        one.start()
    for one in starts:
        one.join(60)
    assert len(progress.standings("ddp")) == 100


# ---- stuck ----------------------------------------------------------------------------------


def test_the_course_s_answer_is_given_after_two_tries_and_the_lesson_goes_on(lesson, capsys):
    check(lesson, wrong)
    lesson.give(TODO)
    assert "give it 2 tries" in capsys.readouterr().out and not lesson.ready(TODO)
    check(lesson, wrong)
    lesson.give(TODO)
    assert f"def {NAME}(" in capsys.readouterr().out
    assert lesson.ready(TODO) and not lesson.done(TODO)
    assert progress.standings("gradient_descent")[NAME] == progress.Standing(2, False, True)
    lesson.summary()
    assert f"0 of 1 done: [given] {TODO} {NAME}" in capsys.readouterr().out
    lesson.keep()
    assert "nothing to write" in capsys.readouterr().out


def test_run_all_in_a_new_kernel_goes_on_where_an_answer_was_given(lesson, capsys):
    for _ in range(2):
        check(lesson, wrong)
    with pytest.raises(NotYet):
        lesson.run(wrong)
    lesson.give(TODO)
    again = new_lesson()
    again.run(wrong)  # red, but the cell below it gives the answer once more
    again.give(TODO)
    assert again.ready(TODO)


def test_what_was_given_can_still_be_solved(lesson):
    for _ in range(2):
        check(lesson, wrong)
    lesson.give(TODO)
    check(lesson, SPEC.truth)
    assert lesson.done(TODO)
    assert progress.standings("gradient_descent")[NAME].is_done


def test_the_last_hint_says_what_is_left(lesson, capsys):
    for _ in SPEC.hints:
        lesson.hint(TODO)
    assert f"After 2 tries check.give('{TODO}') shows" in capsys.readouterr().out


def test_answers_are_compared_once_one_s_own_is_done(lesson, capsys):
    lesson.compare(TODO)
    assert "is not done here" in capsys.readouterr().out
    check(lesson, SPEC.truth)
    lesson.compare(TODO)
    said = capsys.readouterr().out
    assert said.count(f"def {NAME}(") == 2 and "the course's:" in said
    lesson.compare("9.9")
    assert "There is no TODO 9.9 here" in capsys.readouterr().out


# ---- where am I -----------------------------------------------------------------------------


def test_the_overview_knows_every_exercise_by_the_name_that_is_noted():
    for one in overview.lessons():
        word = one.file.partition("_")[2]
        lesson = importlib.import_module(f"manyhands.checks.{word}").lesson
        assert lesson.module == word and {*one.exercises} == {*lesson.exercises}
        for exercise in lesson.exercises.values():
            progress.note(word, exercise.name, "done")
    assert all(not one.left for one in overview.lessons())
    assert "All exercises are done." in repr(overview.Overview(overview.lessons()))


def test_the_overview_says_what_is_done_and_what_comes_next():
    first, second, third, *_ = overview.lessons()
    shown = repr(overview.Overview(overview.lessons()))
    assert f"{first.title}: 0 of {len(first.exercises)}\n" in shown
    assert f"Next: exercise {first.left[0]} in {first.title}." in shown
    todo, (name, _) = next(iter(second.exercises.items()))
    progress.note(second.file.partition("_")[2], name, "done")
    found = overview.Overview(overview.lessons())
    assert f"{second.title}: 1 of {len(second.exercises)}; left: {second.left[1]}" in repr(found)
    assert f"Next: exercise {second.left[1]} in {second.title}." in repr(found)
    page = found._repr_html_()
    assert f"&#10003; {todo}<" in page and f'href="{second.file}.ipynb"' in page
    assert f"&#10003; {third.left[0]}<" not in page


# ---- places ---------------------------------------------------------------------------------


def test_runs_and_functions_lie_beside_the_notebook_or_where_a_setting_says(
    tmp_path, monkeypatch, home
):
    assert (places.runs(), places.mine()) == (Path("runs"), Path("mine"))
    assert places.progress() == home / "manyhands-work/progress"
    monkeypatch.setenv("MANYHANDS_HOME", str(tmp_path / "set"))
    assert storage.next_free(places.runs(), "ddp") == tmp_path / "set/runs/ddp-001"
    assert places.mine() == tmp_path / "set/mine" and places.progress() == tmp_path / "set/progress"
    monkeypatch.setenv("MANYHANDS_RUNS", str(tmp_path / "fast"))
    assert places.runs() == tmp_path / "fast" and places.mine() == tmp_path / "set/mine"


def tell_places(told: Connection, user: int, cwd: str, home: str | None) -> None:
    """In a fork: become another user, and say where what he makes would lie."""
    os.chdir(cwd)
    os.environ.pop("HOME", None)
    os.environ |= {"HOME": home} if home else {}
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        told.send([str(one()) for one in (places.runs, places.mine, places.progress)])
    except places.NoPlace as problem:
        told.send(str(problem))


def places_of(user: int, cwd: str, home: str | None) -> object:
    ours, its = FORK.Pipe()
    process = FORK.Process(target=tell_places, args=(its, user, cwd, home))
    process.start()
    its.close()
    try:
        return ours.recv()
    finally:
        process.join(30)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_in_a_read_only_folder_they_lie_in_the_home_and_without_one_a_line_says_so(home):
    work = f"{home}/manyhands-work"
    found = places_of(65534, "/usr/share", str(home))
    assert found == [f"{work}/runs", f"{work}/mine", f"{work}/progress"]
    said = places_of(54321, "/usr/share", None)
    assert said.startswith("cannot write ~/manyhands-work: user 54321 has no home folder; ")
    assert said.endswith("or set MANYHANDS_HOME to another folder of yours")


def test_a_full_disk_leaves_the_functions_that_were_there(tmp_path, monkeypatch):
    mine.write("demo", {"line": places.home})
    before = Path("mine/demo.py").read_text()

    def full(path: Path, content: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mine.storage, "replace_file", full)
    with pytest.raises(BadInput, match="cannot write mine/demo.py: No space left on device"):
        mine.write("demo", {"line": places.beside})
    assert Path("mine/demo.py").read_text() == before


def test_a_job_finds_the_functions_from_the_notebook_s_folder_and_from_the_course_s(
    tmp_path, monkeypatch
):
    mine.write("demo", {"home": places.home})
    assert mine.load("demo", ["home"])["home"]() == places.home()
    course = tmp_path / "course"
    course.mkdir()
    (tmp_path / "notebook").rename(course / "notebooks")
    monkeypatch.chdir(course)
    assert set(mine.load("demo", ["home"])) == {"home"}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"mine/demo.py is not there: run check.keep\(\)"):
        mine.load("demo", ["home"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_functions_of_another_user_are_not_run(tmp_path):
    path = mine.write("demo", {"home": places.home})
    os.chown(path, 65534, 65534)
    with pytest.raises(BadInput, match="belongs to another user"):
        mine.load("demo", ["home"])


def test_a_folder_that_cannot_be_written_is_a_line_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_RUNS", "/proc/runs")
    with pytest.raises(places.NoPlace, match="cannot write /proc/runs: .*; free some space"):
        submit.submit("../sbatch/ddp.sbatch", local=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_home_is_told_where_data_may_lie():
    def read_as_nobody() -> str:
        import tokenizers  # noqa: F401 (the folder of Python may be closed to others)

        os.environ.pop("XDG_CACHE_HOME", None)
        del os.environ["HOME"]
        os.setuid(12345)
        corpus.train_byte_pairs("ab" * 50, 300)  # goes on without a cache
        try:
            return corpus.load("wikitext-2", 4).note
        except BadInput as problem:
            return str(problem)

    assert "user 12345 has no home folder for data: set XDG_" in run_ranks(read_as_nobody, 1)[0]
