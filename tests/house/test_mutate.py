"""Faults are drawn alike with the same seed, change what they say, and leave the rest alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import faults
import mutate
from faults import Fault, Source

CODE = '''\
"""A text with 1 < 2 and not 3."""
from typing import TYPE_CHECKING

LIMIT_S = 5
if TYPE_CHECKING:
    import os; os.getpid()


def both(a: int = 1, *, group: "1 + 1" = None) -> bool:
    """Returns 1."""
    \u00e9 = a - 1; a += \u00e9
    if not (a and group):
        print(f"{a + 1} is 1", end="")
        raise ValueError(a + 1)
    both(a, group=group)
    dist.all_reduce(a)
    return a < 3
'''
CHANGES = {
    "comparison": {"a <= 3"},
    "sign": {"\u00e9 = a + 1"},
    "one more": {"a: int = 2", "\u00e9 = a - 2", "a < 4"},
    "no not": {"if (a and group):"},
    "and for or": {"(a or group)"},
    "no argument": {"both(a)"},
    "no statement": {"; pass", "    pass"},
    "other value": {"return not (a < 3)"},
}


def found_in(text: str) -> list[Fault]:
    source = Source(text)
    table = faults.changes_in(source)
    made = [faults.fault("r", "f.py", source, name, one) for name in table for one in table[name]]
    return [one for one in made if one is not None]


def test_each_operator_changes_code_and_nothing_else():
    found = found_in(CODE)
    assert {one.operator for one in found} == set(CHANGES) == set(faults.OPERATORS)
    for one in found:
        assert any(words in one.after for words in CHANGES[one.operator]), one
        number = CODE.split("\n").index(one.before.split("\n")[0]) + 1
        assert number == one.line and one.applied(CODE) != CODE
    counts = [sum(one.operator == name for one in found) for name in CHANGES]
    assert counts == [1, 1, 3, 1, 1, 1, 3, 1], found


def test_of_equal_lines_the_nearest_is_changed_and_absent_ones_are_told():
    text = "x = 1\ny = 1\nx = 1\n"
    assert Fault("r", "f.py", 3, "one more", "x = 1", "x = 2").applied(text).endswith("x = 2\n")
    with pytest.raises(LookupError, match="no such lines: z"):
        Fault("r", "f.py", 3, "one more", "z = 1", "z = 2").applied(text)


def test_a_seed_draws_the_same_faults_in_all_rooms():
    drawn = faults.draw(mutate.ROOT, 29, 30)
    assert drawn == faults.draw(mutate.ROOT, 29, 30) != faults.draw(mutate.ROOT, 30, 30)
    rooms = [one.room for one in drawn]
    assert {room: rooms.count(room) for room in rooms} == dict.fromkeys(faults.ROOMS, 3)
    assert all(mutate.tests_of(one, mutate.ROOT) for one in drawn)


def test_numbers_of_faults():
    assert mutate.numbers_of("3,7-9", 30) == [3, 7, 8, 9]
    assert mutate.numbers_of("all", 3) == [1, 2, 3]
    with pytest.raises(SystemExit, match="the faults 1 to 3"):
        mutate.numbers_of("4", 3)


TELL = "import sys, manyhands.ranks.lab as m; sys.exit(f'FAILED {m.__file__}')"


def test_a_fault_is_made_in_a_copy_whose_own_code_runs(tmp_path: Path, capsys, monkeypatch):
    """The copy has the fault, and its Python imports the copy's package; all is gone afterwards."""
    if subprocess.run(["git", "rev-parse"], cwd=mutate.ROOT, capture_output=True).returncode:
        pytest.skip("only a checkout of git has copies")
    path = mutate.ROOT / "scripts" / "manyhands" / "ranks" / "lab.py"
    before, copies = path.read_bytes(), []
    monkeypatch.setattr(mutate, "LIST", tmp_path / "faults.json")
    monkeypatch.setattr(faults, "draw", lambda *_: [fault_of(path)])
    monkeypatch.setattr(mutate, "RECORD", tmp_path / "faults.jsonl")
    for command, wanted in (
        (
            f'grep -q "^# a fault" scripts/manyhands/ranks/lab.py && {{python}} -c "{TELL}"',
            "killed",
        ),
        ("sleep 60", "late"),
        ("true", "survived"),
    ):
        words = ["--apply", "1", "--command", command, "--limit-s"]
        words += ["0.5"] if wanted == "late" else ["60", "--seed", "1"]
        monkeypatch.setattr(sys, "argv", ["mutate.py", *words])
        assert mutate.main() == 0
        said = capsys.readouterr().out
        assert f"1 {wanted} " in said
        copies += re.findall(r"FAILED (\S+)/scripts/manyhands/ranks/lab.py", said)
    (copy,) = copies
    assert not Path(copy).exists() and copy not in mutate.git("worktree", "list")
    assert path.read_bytes() == before
    assert (tmp_path / "faults.jsonl").read_text().count("\n") == 3


def fault_of(path: Path) -> Fault:
    first = path.read_text().split("\n")[0]
    file = str(path.relative_to(mutate.ROOT))
    return Fault("ranks", file, 1, "one more", first, f"# a fault\n{first}")
