"""What `make chaos` does twenty times: kill a rank, kill a node, and lose nothing."""

import re
import sys
from pathlib import Path

from jobs import environment, left_behind, run

CHAOS = Path(__file__).with_name("chaos.py")


def test_a_killed_rank_and_a_lost_node_cost_nothing(slurm_installed, tmp_path):
    env = environment(TMPDIR=str(tmp_path))
    code, said, errors = run([sys.executable, CHAOS, "--kills", 2], tmp_path, 280, env=env)
    print(said)
    assert code == 0, said + errors
    assert re.search(r"\. rank [01] killed after step \d+: submitted again, resumed at", said)
    assert re.search(r"\. \S+ killed after step \d+: \w+ again by Slurm, resumed at step", said)
    assert "2 kills (1 node, 1 rank): 2 resumed" in said
    assert said.endswith("0 steps lost beyond the last checkpoint, 0 processes left\n")
    assert not left_behind(tmp_path)
