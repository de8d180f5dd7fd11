"""The parts of `make gpu`: what runs, on how many ranks, for how long at most, and what came out.

    run_all --> bash sbatch/launch.sh scripts/gpu.py --part ddp      a program of its own each,
            --> bash sbatch/fsdp.sbatch --steps 20 ...               on as many ranks as GPUs

A part that fails, or takes longer than its limit, becomes a row that says why in one line, and the
others go on. All of them are programs of their own, so that none takes the memory of another and a
crash ends one part only.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from manyhands.gpu import jobs, memory, sharding, speed, techniques
from manyhands.gpu.measuring import Rows
from manyhands.jobs.submit import Job, submit
from manyhands.jobs.watch import tail
from manyhands.training.storage import read_json

SBATCH = Path(__file__).resolve().parents[3] / "sbatch"
LEAST_S = 5  # less time is not worth a start
BUS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Part:
    """A part that measures.

    Args:
        function: (device, scale) -> rows, called on each rank, or None for a job.
        limit_s: for all of it, with the start of the program; among jobs, for each of them.
        needs: ranks; with fewer it is left out.
        alone: runs on one rank, however many GPUs there are.
    """

    title: str
    function: Callable[..., Rows] | None
    limit_s: float
    needs: int = 1
    alone: bool = False


PARTS = {
    "bandwidth": Part("Bandwidth of collectives by size", None, 60),
    "memory": Part("Memory, predicted and measured", memory.memory, 60, alone=True),
    "speed": Part("Training speed of one GPU", speed.speed, 75, alone=True),
    "ddp": Part("DDP by hand and PyTorch's", techniques.ddp, 60),
    "fsdp": Part("FSDP by hand and fully_shard", techniques.fsdp, 60),
    "pipeline": Part("1F1B by hand and PyTorch's", techniques.pipeline, 75, needs=2),
    "tensor": Part("Tensor parallelism by hand and PyTorch's", techniques.tensor, 75, needs=2),
    "prefetch": Part("FSDP with and without gathering ahead", sharding.prefetch, 60),
    "offload": Part("fully_shard, offloaded and not", sharding.offload, 90),
    "compiled": Part("Training speed with torch.compile", speed.compiled, 200, alone=True),
    "jobs": Part("Every job of the course", None, 45),
}


@dataclass(frozen=True)
class Setting:
    """What all parts are told."""

    folder: Path
    device: str  # cuda or cpu
    num_ranks: int
    tiny: bool
    deadline_s: float  # on the clock of time.monotonic

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()


def run_all(setting: Setting, only: str) -> Iterator[tuple[str, dict]]:
    """Run the parts whose name holds `only`; yields the name and the outcome of each.

    An outcome: {"title", "state": done, failed or left out, "why", "ranks", "time_s", "rows",
    "machine"}.
    """
    for name, part in PARTS.items():
        if only not in name:
            continue
        begin_s = time.monotonic()
        ranks = 1 if part.alone else setting.num_ranks
        told = {"title": part.title, "ranks": ranks, "state": "done", "why": "", "rows": []}
        if ranks < part.needs:
            told |= {"state": "left out", "why": f"needs {part.needs} GPUs, and there is {ranks}"}
        else:
            told |= run_part(name, part, setting, ranks)
        yield name, told | {"time_s": round(time.monotonic() - begin_s, 1)}


def run_part(name: str, part: Part, setting: Setting, ranks: int) -> dict:
    """State, reason and rows of one part."""
    if name == "jobs":
        runs = jobs.flags(ranks).items()
        rows = [run_job(run, words, setting, part.limit_s) for run, words in runs]
        failed = [row["job"] for row in rows if row["state"] == "failed"]
        why = f"failed: {', '.join(failed)}" if failed else ""
        return {"rows": rows, "why": why, "state": "failed" if failed else "done"}
    if name == "bandwidth":
        mb = 0.1 if setting.tiny else 256
        words = f"--impl torch --max-mb {mb} --device {setting.device}".split()
        state, why, _ = start("collectives.sbatch", words, name, setting, ranks, part.limit_s)
        rows = bandwidths(setting.folder / name / "results.jsonl")
        return {"state": state, "why": why, "rows": rows}
    words = ["scripts/gpu.py", "--part", name, "--device", setting.device]
    words += ["--tiny"] * setting.tiny
    state, why, _ = start("launch.sh", words, name, setting, ranks, part.limit_s)
    found = setting.folder / name / "rows.json"
    return {"state": state, "why": why} | (read_json(found) if found.is_file() else {})


def run_job(run: str, words: str, setting: Setting, limit_s: float) -> dict:
    """The row of a job's short run."""
    file = f"{run.partition(' ')[0]}.sbatch"
    name = f"job-{run.replace(' ', '-')}"
    flags = [*words.split(), "--device", setting.device]
    state, why, job = start(file, flags, name, setting, setting.num_ranks, limit_s)
    row = {"job": run, "state": state, "why": why, "flags": words}
    if job is not None:
        row |= {"time_s": round(job.state.time_s, 1), "result": job.status().get("valid_loss")}
    return row


def start(
    file: str, words: list[str], name: str, setting: Setting, ranks: int, limit_s: float
) -> tuple[str, str, Job | None]:
    """Run a file of sbatch/ here until it ends or its time is over; its state, and why."""
    limit_s = min(limit_s, setting.left_s)
    if limit_s < LEAST_S:
        return "left out", "the time for all parts was over", None
    out = setting.folder / name
    job = submit(SBATCH / file, *words, ranks=ranks, out=out, local=True)
    try:
        if not job.wait(limit_s):
            return "failed", f"not done after {limit_s:.0f} s; see {job.log.name}", job
    finally:
        if not job.poll().ended:
            job.kill()
    if job.state.code:
        return "failed", reason(out, job), job
    return "done", "", job


def reason(out: Path, job: Job) -> str:
    """Why it failed, in one line: as the part itself has said, or the last line of its log."""
    said = out / "why.txt"
    if said.is_file():
        return f"{said.read_text().strip()}; see {job.log.name}"
    words = tail(job.log, 1, width=200)
    return f"exit code {job.state.code}: {words[0] if words else 'it said nothing'}"


def bandwidths(path: Path) -> Rows:
    """The rows of the collectives that sharded and replicated training use, and memory's copy."""
    if not path.is_file():
        return []
    measured = [json.loads(line) for line in path.read_text().splitlines()]
    return [bandwidth(row) for row in measured if row["kind"] in (*BUS, "memory copy")]


def bandwidth(row: Mapping) -> dict[str, object]:
    """The columns of one measurement that the report shows."""
    rates = {name: row[name] for name in ("algorithm_bytes_per_s", "bus_bytes_per_s")}
    return {"what": row["kind"], "size_bytes": row["nbytes"], "call_s": row["time_s"]} | rates
