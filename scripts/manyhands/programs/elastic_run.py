"""An elastic training on this machine: two agents as two nodes, kills, and what is left of it.

    node A   ranks ----- restart ----- restart ------------------ restart ------> end
    node B   ranks --x-- restart --x (the whole node)   again --- restart ------> end
    ranks      2            2             1                          2

torchrun's agents meet at a store. When a rank dies, both agents end their ranks and start new ones;
when a node dies, the other one goes on alone; when a node comes, the agents end their ranks by a
signal, upon which these save, and start new ones. Each start is a life of the run, which goes on
from the newest checkpoint with as many ranks as there are.

The store is a file that no other user can open, so that either node can die. In a job of a cluster
it is one of the nodes, and if that one dies, the scheduler has to start the job again.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import torch

from manyhands.checkpoint.elastic import misused, read_notes, surviving_history
from manyhands.ranks import private
from manyhands.training.storage import read_lines

PROGRAM = Path(__file__).resolve().parents[2] / "train_checkpoint.py"
SETTINGS = {"block": 64, "layers": 2, "batch": 12, "save_every": 20, "valid_tokens": 4096}
REMAKE = "python -c \"from manyhands.programs.elastic_run import store; store('PATH')\""


class Node:
    """A torchrun agent and its ranks. Ends with the `with` block, however that ends.

    Args:
        command: the script and its flags.
        room: where agents meet, and their ranks (private.py).
    """

    def __init__(self, name: str, command: Sequence[str], room: Path, num_ranks: int) -> None:
        self.name, self.num_ranks = name, num_ranks
        conf = "store_type=file,join_timeout=120,last_call_timeout=3"
        words = [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1:2"]
        words += [f"--nproc-per-node={num_ranks}", "--max-restarts=9", "--monitor-interval=0.2"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint={room / 'agents'}"]
        words += [f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", f"--log-dir={room / 'logs'}"]
        words += command
        unwanted = ("MANYHANDS_RULES", private.ROOM)
        environ = {key: value for key, value in os.environ.items() if key not in unwanted}
        # Without this, all lives would have the same port, and new ranks would read in its store
        # where the dead ones had listened.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environ |= {private.STORE: str(room / "store"), "OMP_NUM_THREADS": "1"}
        environ["GLOO_SOCKET_IFNAME"] = private.LOOPBACK
        self.agent = psutil.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ranks(self) -> list[psutil.Process]:
        """Its ranks that live."""
        try:
            return self.agent.children()
        except psutil.NoSuchProcess:
            return []

    def kill_rank(self) -> None:
        """Kill its last rank."""
        self.ranks()[-1].kill()

    def kill(self) -> None:
        """Kill all that it has started, as a power cut does, and wait until all of it is gone."""
        try:
            tree = [*self.agent.children(recursive=True), self.agent]
        except psutil.NoSuchProcess:
            tree = [self.agent]
        for process in tree:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(tree, timeout=20)


def rehearse(
    out: Path, data: str = "embedded", steps: int = 900, num_ranks: int = 1, limit_s: float = 240
) -> list[dict]:
    """Train in `out`: kill a rank, then a node, and bring a node back; returns what was done when.

    Args:
        num_ranks: of each node.
        limit_s: for each wait, and then for the rest of the run.

    Raises:
        TimeoutError: something did not happen in time.
    """
    flags = {**SETTINGS, "data": data, "steps": steps, "device": "cpu", "out": out}
    command = [str(PROGRAM), *(f"--{name}={value}" for name, value in flags.items())]
    with private.made_room() as room:
        return _kill_and_start(lambda name: Node(name, command, room, num_ranks), out, limit_s)


def _kill_and_start(start: Callable[[str], Node], out: Path, limit_s: float) -> list[dict]:
    events = []

    def note(what: str) -> None:
        events.append({"event": what, "step": last_step(out)})

    with start("A") as node_a:
        with start("B") as node_b:
            num_ranks = node_b.num_ranks
            until(lambda: last_step(out) >= 50, limit_s)
            node_b.kill_rank()
            note("a rank is killed")
            until(lambda: life_of(out) >= 1 and last_step(out) >= 110, limit_s)
            node_b.kill()
            note("a node is killed")
        until(lambda: ranks_of(out) == num_ranks and last_step(out) >= 150, limit_s)
        with start("B") as node_b:
            note("a node is started")
            for node in (node_a, node_b):
                if node.agent.wait(limit_s):
                    raise RuntimeError(f"node {node.name} ended with {node.agent.returncode}")
    return events


def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until the condition holds; TimeoutError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.02)


# ---- what the run has written --------------------------------------------------------------------


def last_step(out: Path) -> int:
    """The last step that the run has noted in its present life; 0 before the first."""
    lines = notes_of_rank_0(out)
    return lines[-1]["step"] + 1 if lines else 0


def life_of(out: Path) -> int:
    """The number of the present life; -1 before the first."""
    lines = notes_of_rank_0(out)
    return lines[-1]["life"] if lines else -1


def ranks_of(out: Path) -> int:
    """How many ranks the present life has."""
    lines = notes_of_rank_0(out)
    return lines[-1]["ranks"] if lines else 0


def notes_of_rank_0(out: Path) -> list[dict]:
    """The lines of rank 0 in the newest life that has any."""
    files = sorted(out.glob("samples/life-*-rank-00000.jsonl"))
    texts = (file.read_text() for file in reversed(files))
    newest = next((text for text in texts if "\n" in text), "")
    return [json.loads(line) for line in newest[: newest.rfind("\n") + 1].splitlines()]


def lives(out: Path) -> list[dict]:
    """Of each life: its ranks, its first step, and the step behind its last one."""
    found: dict[int, dict] = {}
    for line in sorted(read_notes(out / "samples"), key=lambda line: line["step"]):
        first = {"ranks": line["ranks"], "start": line["step"]}
        found.setdefault(line["life"], first)["stop"] = line["step"] + 1
    return [found[life] for life in sorted(found)]


def steps_per_epoch(out: Path) -> int:
    """The steps of one epoch, which the lines of metrics.jsonl tell by their epochs."""
    epochs = [line["epoch"] for line in read_lines(out / "metrics.jsonl")]
    return epochs.index(1) if 1 in epochs else len(epochs)


def losses(out: Path) -> list[float]:
    """The loss of each step, as the finished run holds them."""
    return [round(line["loss"], 6) for line in read_lines(out / "metrics.jsonl")]


def store(path: str | Path, where: str | Path = ".", steps: int = 900) -> Mapping:
    """Run the elastic training and a calm one, and write what came out to the file `path`."""
    elastic, calm = Path(where) / "elastic", Path(where) / "calm"
    events = rehearse(elastic, steps=steps, num_ranks=2)
    flags = {**SETTINGS, "steps": steps, "device": "cpu", "out": calm}
    command = [
        sys.executable,
        str(PROGRAM),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600)
    history = surviving_history(read_notes(elastic / "samples"))
    found = {
        "remake": REMAKE,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": "cpu",
        "ranks": "4, then 2, then 4",
        "settings": SETTINGS | {"steps": steps},
        "misused": misused(history, steps, steps_per_epoch(elastic)),
        "events": events,
        "lives": lives(elastic),
        "losses": losses(elastic),
        "calm": losses(calm),
    }
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
    return found
