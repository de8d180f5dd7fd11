"""Measure this machine: one row a figure, with its goal, into bench.json; bench.md shows them.

    python scripts/bench.py --data FOLDER        all rows; FOLDER holds tinyshakespeare
    python scripts/bench.py --only "weak"        the rows whose name holds these letters
    python scripts/bench.py --table              measure nothing; write the file's table, bench.md

A row keeps its earlier figure until it is measured anew, with the machine and the day of that, and
with a hash of the files that it measures: a figure whose files have changed since is of older code,
and the table says so. Figures are worth keeping from an idle machine only: a note says when other
programs were busy. A row that cannot be measured fails the command.
"""

import hashlib
import json
import os
import platform
import re
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil
import torch

from manyhands.instruments.benchmark import CannotMeasure, Measure, Row, plain
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "scripts" / "manyhands"
ROOMS = (  # in the order of the table
    "collectives",
    "data_parallel",
    "fsdp",
    "checkpoint",
    "pipeline",
    "tensor",
    "mesh",
    "models",
    "ranks",
    "checks.engine",
    "instruments",
    "training",
)
BUSY_CORES = 0.5  # what other programs may use before a note says so
IN_README = {
    "DDP": "data parallelism by hand, overlapped / PyTorch's DDP, time of a step",
    "FSDP": "FSDP by hand / PyTorch's fully_shard, time of a step, 2 ranks",
    "1F1B": "1F1B by hand / PyTorch's Schedule1F1B, time of a step, 2 ranks",
}
START = "<!-- measured -->\n"
END = "<!-- /measured -->"


@dataclass(frozen=True)
class Config:
    """What to measure."""

    only: str = ""
    """Measure only the rows whose name holds this text."""
    out: str = str(ROOT / "bench.json")
    """File for the figures; rows that are not measured keep theirs."""
    data: str = ""
    """Folder or file with tinyshakespeare, for the rows of nanoGPT's recipe."""
    table: bool = False
    """Measure nothing; write bench.md's table, and README's line of it, from the file."""
    pages: str = str(ROOT)
    """The folder with bench.md and README.md."""


def measures() -> list[Measure]:
    """Every room's rows."""
    modules = [import_module(f"manyhands.{room}.bench") for room in ROOMS]
    return [measure for module in modules for measure in module.MEASURES]


# ---- the machine -----------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What figures are taken on."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def own_cpu_s() -> float:
    """Seconds that this process and all that it started have spent on any core."""
    total_s, me = 0.0, psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it may end just now
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def all_cpu_s() -> float:
    """Seconds that all programs of this machine have spent on any core."""
    times = psutil.cpu_times()._asdict()
    # Guests are counted under user already.
    return sum(
        times[kind] for kind in times if kind not in ("idle", "iowait", "guest", "guest_nice")
    )


# ---- measuring -------------------------------------------------------------------------------


def code_hash(measure: Measure) -> str:
    """Of the contents of the files that a row measures."""
    digest = hashlib.sha256()
    for pattern in measure.files:
        paths = sorted(PACKAGE.glob(pattern))
        if not paths:
            raise ValueError(f"{pattern}, which a row measures, is not there")
        for path in paths:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def take(measure: Measure, data: str) -> dict[str, dict]:
    """Measure, and note where other programs had a part in it; by the names of the rows."""
    start_s = time.perf_counter()
    before_s = all_cpu_s() - own_cpu_s()
    measured = measure.function(data) if measure.needs_data else measure.function()
    others = (all_cpu_s() - own_cpu_s() - before_s) / (time.perf_counter() - start_s)
    busy = f"; BUSY: other programs used {others:.1f} cores" if others > BUSY_CORES else ""
    rows = {}
    for row, (value, note) in zip(measure.rows, measured, strict=True):
        rows[row.name] = {
            "value": round(value, 4),
            "goal": row.goal,
            "unit": row.unit,
            "note": note + busy,
            "date": time.strftime("%Y-%m-%d"),
            "code": code_hash(measure),
            "machine": machine(),
        }
    return rows


def measure_rows(config: Config, rows: dict[str, dict], path: Path) -> list[str]:
    """Measure the rows that are asked for, into the file; what could not be measured."""
    failed = []
    for measure in measures():
        wanted = [row.name for row in measure.rows if config.only in row.name]
        if not wanted:
            continue
        if measure.needs_data and not config.data:
            print(f"{', '.join(wanted)}: left out, since it needs --data FOLDER")
            continue
        try:
            new = take(measure, config.data)
        except CannotMeasure as problem:
            failed.append(f"{', '.join(wanted)}: {problem}")
            continue
        for name in wanted:
            rows[name] = new[name]
            show(name, new[name])
        write(path, rows)
    return failed


# ---- the table -------------------------------------------------------------------------------


def show(name: str, row: dict) -> None:
    """Print one row, with its note below."""
    print(f"{plain(row['value']):>8} {row['unit']}, goal {row['goal']}: {name}")
    print(textwrap.indent(textwrap.fill(row["note"], 92), " " * 4), flush=True)


def older(rows: dict[str, dict]) -> list[str]:
    """Names of the figures whose files have changed since."""
    return [
        row.name
        for measure in measures()
        for row in measure.rows
        if row.name in rows and rows[row.name]["code"] != code_hash(measure)
    ]


def table(rows: dict[str, dict]) -> str:
    """bench.md's table of all rows, in order, with what they were taken on."""
    of_older_code = older(rows)
    known = [row for measure in measures() for row in measure.rows if row.name in rows]
    one = rows[known[0].name]["machine"]
    dates = sorted(rows[row.name]["date"] for row in known)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    intro = (
        f"On {one['cores']} cores ({one['cpu']}, Python {one['python']}, torch {one['torch']}, "
        f"{days}). `make bench` measures yours into `bench.json`: ratios are taken in turn within "
        "one run, and the notes there hold the spread. `.venv/bin/python scripts/bench.py --table` "
        "writes this table from that file."
    )
    lines = ["| figure | goal | measured |", "|---|---|---:|"]
    for row in known:
        value = plain(rows[row.name]["value"])
        unit = "" if "/" in row.unit and row.unit != "tokens/s" else f" {row.unit}"
        mark = " (older code)" if row.name in of_older_code else ""
        lines.append(f"| {row.name} | {words_of(row)} | {value}{unit}{mark} |")
    return "\n".join([textwrap.fill(intro, 99), "", *lines, ""])


def line(rows: dict[str, dict]) -> str:
    """README's line: a step by hand in the time of PyTorch's, of the rows that there are."""
    known = [
        f"{name} {plain(rows[row]['value'])}" for name, row in IN_README.items() if row in rows
    ]
    text = f"A step by hand takes this share of the time of PyTorch's own: {', '.join(known)}."
    return textwrap.fill(text, 99) + "\n"


def words_of(row: Row) -> str:
    """The goal as the table says it."""
    signs = {"<=": "at most", ">=": "at least", "<": "under"}
    sign, _, bound = row.goal.partition(" ")
    return f"{signs[sign]} {bound}{' s' if row.unit == 's' else ''}"


def with_measured(page: Path, content: str) -> str:
    """The page's text with `content` between its marks."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise BadInput(f"{page} has no lines {START.strip()} and {END}")
    return before + mark + content + end + after


def wanted_pages(folder: Path, rows: dict[str, dict]) -> dict[Path, str]:
    """What bench.md and README have to hold."""
    contents = {"bench.md": table(rows), "README.md": line(rows)}
    return {folder / name: with_measured(folder / name, one) for name, one in contents.items()}


def read(path: Path) -> dict[str, dict]:
    """The rows taken so far, by name; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}


def write(path: Path, rows: dict[str, dict]) -> None:
    """Write the figures; those of rows that are gone go as well."""
    names = {row.name for measure in measures() for row in measure.rows}
    content = {
        "remake": "make bench DATA=FOLDER, on an idle machine",
        "rows": {name: row for name, row in rows.items() if name in names},
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise BadInput(f"cannot write {path}: {problem.strerror}: choose another --out") from None


def main(config: Config) -> None:
    """Measure the rows asked for, print them, and write them down; or write the pages."""
    path = Path(config.out)
    rows = read(path)
    if config.table:
        for page, text in wanted_pages(Path(config.pages), rows).items():
            page.write_text(text, encoding="utf-8")
    else:
        names = [row.name for measure in measures() for row in measure.rows]
        if not any(config.only in name for name in names):
            raise BadInput(f"--only {config.only!r} is in no row's name: {', '.join(names)}")
        print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
        write(path, rows)  # a path that cannot be written is known before the work
        if failed := measure_rows(config, rows, path):
            raise BadInput("could not be measured: " + "; ".join(failed))
    if names := older(rows):
        print(f"older code: {'; '.join(names)}")


if __name__ == "__main__":
    command_line(main, Config)
