"""What `make chaos` does fifty times: kill a rank, a node or the controller, damage a checkpoint or
fill up a disk, and lose nothing.

In every run, test_slurm.py kills a rank and a node, and test_resume.py damages checkpoints.
"""

import random
import re
import sys
from pathlib import Path

import pytest

import damage
from commands import ROOT, environment, left_behind, make_clone, run

pytestmark = pytest.mark.nightly
CHAOS = ROOT / "tests" / "chaos.py"


def test_kills_of_a_rank_a_node_and_the_controller_cost_nothing(slurm_installed, tmp_path):
    env = environment(TMPDIR=str(tmp_path))
    code, said, errors = run([sys.executable, CHAOS, "--kills", 3], tmp_path, 400, env=env)
    print(said)
    assert code == 0, said + errors
    assert re.search(r"\. rank [01] killed after step \d+: submitted again, resumed at", said)
    assert re.search(r"\. \S+ killed after step \d+: \w+ again by Slurm, resumed at step", said)
    assert re.search(r"\. the controller killed after step \d+ .*: the job trained on", said)
    assert "3 kills (1 controller, 1 node, 1 rank): 2 resumed" in said
    assert said.endswith("last checkpoint, 0 tracebacks, 0 processes left\n")
    assert not left_behind(tmp_path)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def test_damages_are_found_and_the_newest_intact_checkpoint_is_loaded(clone, capsys):
    damage.damages(clone, 2 * len(damage.KINDS), random.Random(16))
    said = capsys.readouterr().out
    for kind in damage.KINDS:
        assert said.count(f". {kind}: step-") == 2
    assert "10 damages (2 cut short, 2 bit changed, 2 missing, 2 swapped, 2 from" in said


def test_a_disk_that_fills_up_in_a_save_loses_nothing(clone, capsys):
    if not damage.fill_a_disk(clone):
        pytest.skip(capsys.readouterr().out.strip())
    assert re.search(
        r"a disk of 0.\d MB was full while step-0+9 was saved", capsys.readouterr().out
    )
