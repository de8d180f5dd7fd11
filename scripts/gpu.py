"""Run what only a GPU can show, on 1 to 8 GPUs of this machine, and write a report of it.

    make gpu                                       all parts, in at most ten minutes
    python scripts/gpu.py --only fsdp              the parts whose name holds these letters
    RANKS=2 python scripts/gpu.py --device cpu --tiny     try the parts out; the times mean nothing

    runs/gpu-001/report.html     one page
                 gpu.json        its numbers, with the machine and the day
                 *.log           what each part printed; job-*/ are the runs of the jobs

The parts are the bandwidth of NCCL by size, tokens per second and model FLOPs utilisation with and
without torch.compile, memory predicted and measured, the step times of DDP, FSDP, 1F1B and tensor
parallelism by hand and of PyTorch's, what gathering ahead gains and offloading saves, and a short
run of every job. 1F1B and tensor parallelism need 2 GPUs. A part that fails has a row that says
why, and the others go on.

Exit codes: 0 all parts that ran are done, 1 a part failed and has a row that says why, 2 no GPU.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from manyhands.gpu import page, plan, scales
from manyhands.gpu.measuring import one_line
from manyhands.gpu.peaks import peak_of, utilisation
from manyhands.instruments.meters import machine
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line, distributed
from manyhands.training import places
from manyhands.training.storage import next_free, write_json

MAX_GPUS = 8
GROUP_S = 60  # how long a rank waits for another one


@dataclass(frozen=True)
class Config:
    """What to run, and where."""

    only: str = ""
    """Run only the parts whose name holds this text."""
    limit_min: float = 9.5
    """Time for all parts together, in minutes; what does not begin before that is left out."""
    peak_tflops: float = 0.0
    """Peak of a GPU in TFLOP/s of dense bfloat16 products; 0 looks up the GPU's name."""
    device: str = "cuda"
    """cuda, or cpu to try the parts out without a GPU."""
    tiny: bool = False
    """Measure tiny models; the numbers mean nothing."""
    out: str = ""
    """Folder for the report; empty takes the next free one, runs/gpu-001 and so on."""
    part: str = ""
    """Be a rank of this part, as the command itself starts it."""


def main(config: Config) -> None:
    """Run the parts, or be a rank of one."""
    if config.part:
        run_rank(config)
    else:
        run_parts(config)


def run_parts(config: Config) -> None:
    """Run all parts one after the other, and write the report after each of them."""
    num_ranks = count_ranks(config)
    if not any(config.only in name for name in plan.PARTS):
        raise BadInput(f"--only {config.only!r} is in no part's name: {', '.join(plan.PARTS)}")
    folder = Path(config.out) if config.out else next_free(places.runs(), "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    deadline_s = begin_s + 60 * config.limit_min
    setting = plan.Setting(folder.resolve(), config.device, num_ranks, config.tiny, deadline_s)
    result = {
        "format": "manyhands gpu 1",
        "remake": "make gpu",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": config.device,
        "ranks": num_ranks,
        "tiny": config.tiny,
        "machine": None,  # until a part has seen it
        "peak": None,
        "parts": {},
    }
    print(f"{num_ranks} rank(s) on {config.device}; logs and report in {folder}", flush=True)
    for name, outcome in plan.run_all(setting, config.only):
        seen = outcome.pop("machine", None)
        result["machine"] = result["machine"] or seen
        result["peak"] = find_peak(config, result["machine"])
        result["parts"][name] = outcome
        for part in result["parts"].values():
            if result["peak"]:
                utilisation(part["rows"], result["peak"]["flops_per_s"])
        result["time_s"] = round(time.monotonic() - begin_s, 1)
        write_json(folder / "gpu.json", result)
        page.write_page(folder, result)
        why = f": {outcome['why']}" if outcome["why"] else ""
        print(f"{name}: {outcome['state']} in {outcome['time_s']} s{why}", flush=True)
    print(f"report: {folder}/report.html")
    if any(part["state"] == "failed" for part in result["parts"].values()):
        raise SystemExit(1)


def count_ranks(config: Config) -> int:
    """One rank for each GPU; on a CPU as many as RANKS says, or 2."""
    if config.device not in ("cuda", "cpu"):
        raise BadInput(f"--device is {config.device!r}: choose cuda or cpu")
    if config.device == "cpu":
        ranks = os.environ.get("RANKS", "2")
        if not ranks.isdigit() or int(ranks) < 1:
            raise BadInput(f"RANKS is {ranks!r}: give the number of ranks, 1 or more")
        return int(ranks)
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise BadInput(
            f"torch {torch.__version__} sees no GPU on this machine, so there is nothing to "
            "measure: start it where there is one, or add --device cpu --tiny to try the parts out"
        )
    return min(num_gpus, MAX_GPUS)


def find_peak(config: Config, seen: dict | None) -> dict | None:
    """Peak FLOP/s of the GPU and where that number is from."""
    if config.peak_tflops:
        return {"flops_per_s": config.peak_tflops * 1e12, "source": "--peak-tflops"}
    found = peak_of((seen or {}).get("name", ""))
    return found._asdict() if found else None


def run_rank(config: Config) -> None:
    """Measure one part, with the other ranks; rank 0 writes what came out."""
    scale = scales.TINY if config.tiny else scales.FULL
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    with distributed(config.device, timeout_s=GROUP_S) as world:
        try:
            rows = plan.PARTS[config.part].function(world.device, scale)
        except Exception as problem:
            with suppress(FileExistsError), open(folder / "why.txt", "x") as file:
                file.write(one_line(problem))  # of the first rank that fails; others follow it
            raise
        if world.is_main:
            write_json(folder / "rows.json", {"machine": machine(world.device), "rows": rows})


if __name__ == "__main__":
    command_line(main, Config)
