"""Write the report of a run: what it did, how fast, and where the time and the machines went.

runs/ddp-001 --> report.html            one page, for a browser without a network
                 report.png             all figures on one slide, 1600 x 900
                 report-<figure>.png    each figure
"""

import base64
import html
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from manyhands.instruments.live import Live
from manyhands.instruments.meters import duration, idle_words, scaled
from manyhands.training.record import (
    Device,
    Record,
    integral,
    loss_words,
    mean_busy,
    noun,
    read,
    scheduler_words,
)
from manyhands.training.run import Run, save_once
from manyhands.training.storage import replace_file

if TYPE_CHECKING:
    from manyhands.training.report_figures import Picture

SILENT_AFTER_S = 60.0
IDLE_BELOW = 0.1
TOP = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #f7f7f5; --card: #fff; --line: #d5d5d0;
  --weak: #5c5c58; --good: #007a58; --bad: #b34700; --going: #0067a3; --warn: #fff3d6;
  --warn-line: #c98500 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e4; --paper: #1c1d1f; --card: #27282b; --line: #44464a; --weak: #adada8;
    --good: #4cc9a0; --bad: #ff9d5c; --going: #7cc4f0; --warn: #3a3017; --warn-line: #d99e2b }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.45 system-ui, sans-serif }}
h1 {{ font-size: 1.4rem; margin: .25rem 0; overflow-wrap: anywhere }}
h2 {{ font-size: 1.05rem; margin: 0 0 .5rem }}
.lead {{ margin: 0 0 1rem; color: var(--weak); overflow-wrap: anywhere }}
.idle {{ margin: 0 0 1rem; padding: .6rem .9rem; background: var(--warn);
  border-left: 4px solid var(--warn-line); border-radius: 4px; overflow-wrap: anywhere }}
.idle p {{ margin: .2rem 0 }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .6rem;
  margin: 0 0 1rem }}
.tiles div, .card, details {{ background: var(--card); border: 1px solid var(--line);
  border-radius: 6px }}
.tiles div {{ padding: .55rem .75rem }}
dt {{ color: var(--weak); font-size: .85rem }}
dd {{ margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere }}
dd small {{ display: block; font-size: .85rem; font-weight: 400; color: var(--weak) }}
.finished {{ color: var(--good) }} .failed, .running-but, .ended-but {{ color: var(--bad) }}
.running, .stopped {{ color: var(--going) }}
.cards {{ columns: 21rem; column-gap: 1rem; margin: 0 0 1rem }}
.card {{ padding: .75rem; margin: 0 0 1rem; break-inside: avoid }}
figure {{ margin: 0 }}
img {{ display: block; width: 100%; background: #fff; border-radius: 4px }}
figcaption {{ margin: .5rem 0 0; font-size: .92rem }}
details {{ padding: .6rem .75rem; margin: 0 0 1rem }}
summary {{ font-weight: 600; cursor: pointer }}
table {{ border-collapse: collapse; width: 100%; margin: .5rem 0 0 }}
th, td {{ text-align: left; font-weight: normal; padding: .3rem .75rem .3rem 0;
  border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }}
th {{ color: var(--weak); width: 36% }}
.wide {{ column-span: all; overflow-x: auto }}
.wide p {{ margin: .3rem 0 }} .wide th, .wide td {{ width: auto; overflow-wrap: normal }}
</style></head><body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
"""
PAGE = (
    TOP
    + """{idle}<dl class="tiles">{tiles}</dl>
<div class="cards">{figures}</div>
<details open><summary>The job</summary><table>{job}</table></details>
<details><summary>Settings</summary><table>{settings}</table></details>
</body></html>
"""
)


# ---- words -------------------------------------------------------------------------------------


def state(record: Record) -> str:
    """How the run stands, in words; a run that was killed cannot say so itself."""
    word = record.status.get("state", "not started")
    if word != "running":
        return word
    if record.why_gone:
        return f"ended without a word, {record.why_gone}"
    last_s = record.lives[-1][1] if record.lives else 0.0
    silent_s = time.time() - max(last_s, record.status.get("time_s", 0.0))
    if silent_s < SILENT_AFTER_S:
        return word
    unknown = "" if record.why_gone == "" else "; whether it still runs cannot be seen from here"
    return f"running, but silent for {duration(silent_s)}{unknown}"


def counted(number: int, what: str) -> str:
    """The number with its noun: "1 node", "2 nodes"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def some(names: Sequence[str], limit: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def ranks_words(record: Record) -> str:
    """How many ranks on how many nodes: "2 ranks on 1 node"."""
    return f"{counted(len(record.ranks), 'rank')} on {counted(len(record.hosts), 'node')}"


def granted_words(record: Record) -> str:
    """What was granted: "4 GPUs (NVIDIA H100), 64 cores"."""
    cores = sum(record.granted(host, "num_cores") for host in record.hosts)
    gpus = sum(record.granted(host, "num_gpus") for host in record.hosts)
    names = sorted({rank["name"] for rank in record.ranks if "name" in rank})
    kind = f" ({', '.join(names)})" if names else ""
    return (f"{counted(gpus, 'GPU')}{kind}, " if gpus else "") + counted(cores, "core")


def used_words(record: Record) -> str:
    """What the ranks run on: "1 GPU", "2 threads of CPUs"."""
    gpus = {(rank["host"], rank["device"]) for rank in record.ranks if "cuda" in rank["device"]}
    threads = [rank.get("num_threads", 1) for rank in record.ranks if "cuda" not in rank["device"]]
    words = [counted(len(gpus), "GPU")] if gpus else []
    return ", ".join(words + ([counted(sum(threads), "CPU thread")] if threads else []))


def time_words(record: Record) -> tuple[str, str]:
    """Time used, and of how much: a limit of the scheduler is one life's."""
    lengths_s = [end_s - begin_s for begin_s, end_s in record.paid]
    if not lengths_s:
        return "-", ""
    limit_s = record.job.get("time_limit_s")
    asked = ""
    if limit_s:
        asked = f"of {duration(limit_s)} asked ({lengths_s[-1] / limit_s:.0%})"
    if len(lengths_s) > 1:
        asked += f"; {duration(sum(lengths_s))} with the lives before it"
    return duration(lengths_s[-1]), asked


def restarts_words(record: Record) -> str:
    """How often the run began again, and how long nothing ran."""
    count = max(record.job.get("restarts", 0), len(record.lives) - 1)
    if not count:
        return "none"
    waits_s = [
        later[0] - before[1] for before, later in zip(record.lives, record.lives[1:], strict=False)
    ]
    times = "once" if count == 1 else f"{count} times"
    return f"restarted {times}; nothing ran for {duration(sum(waits_s))} in between"


def valid_words(record: Record) -> str:
    """How long all validation and the test took, as a share of this start's time; or ""."""
    valid_s = record.status.get("valid_s")
    if valid_s is None:
        return ""
    begin_s, end_s = record.paid[-1] if record.paid else (0.0, 0.0)
    share = f", {valid_s / (end_s - begin_s):.0%} of the time used" if end_s > begin_s else ""
    return f"{duration(valid_s)}{share}"


def busy_words(record: Record) -> tuple[str, str]:
    """Share of the device-hours that were busy, and how many those are."""
    bill = record.bill
    if bill.busy_h is None:
        return "not measured", f"of {bill.charged_h:.2g} {bill.unit}-hours"
    share = bill.busy_h / bill.charged_h if bill.charged_h else 0.0
    hours = f"{bill.busy_h:.2g} of {bill.charged_h:.2g} {bill.unit}-hours"
    return f"{share:.0%}", hours


def energy_words(record: Record) -> str | None:
    """Energy of the GPUs, or why it is not known; None where there are none."""
    bill = record.bill
    if bill.unit != "GPU" or not record.nodes:
        return None
    if bill.energy_kwh is None:
        return f"not known ({some(whys(record)) or 'no sample'})"
    of = f" (of {bill.num_told} of {bill.num_granted} GPUs)" * (bill.num_told < bill.num_granted)
    return f"{bill.energy_kwh:.3g} kWh{of}"


def whys(record: Record) -> list[str]:
    """Why GPUs could not be measured, in NVML's words."""
    last = [rows[-1].get("gpus", []) for rows in record.nodes.values() if rows]
    return sorted({gpu["why"] for gpus in last for gpu in gpus if gpu.get("why")})


def loss_rows(record: Record) -> dict[str, str]:
    """Training and validation loss, with the floor where there is one; or what tasks came to."""
    name, unit = loss_words(record)
    floor = record.about.get("floor")
    known = f" {unit}" + ("" if floor is None else f" (floor {floor:.4f})")
    losses = record.column("loss")
    result = record.about.get("result_name")
    last = [] if result else losses[-1:]
    rows = {f"last training {name}": f"{loss:.4f}{known}" for _, loss in last}
    if record.status.get("valid_loss") is not None:
        value = record.status["valid_loss"]
        digits = 4 if value < 10 else 1  # the mean number of steps of a job of tasks
        rows[result or f"validation {name}"] = f"{value:.{digits}f}{known}"
    if record.status.get("test_loss") is not None:
        more = [record.status["test_words"], f"from step {record.status['test_step']}"]
        tested = f"{record.status['test_loss']:.4f} {unit}, {', '.join(filter(None, more))}"
        rows[f"test {name}"] = tested
    return rows


def steps_words(record: Record) -> str:
    """Steps done of those to take."""
    written = record.steps[-1]["step"] if record.steps else 0
    done = max(written, record.status.get("step", 0))  # a task may be done and have no line
    total = record.about.get("config", {}).get("steps", record.status.get("steps"))
    return f"{done} of {total}" if total else f"{done}"


def summary(record: Record) -> dict[str, str]:
    """The table of the job."""
    about = record.about
    speed = record.speed()
    rows = {
        "job": about.get("identity", {}).get("job", "-"),
        "scheduler": scheduler_words(record.job) or "none: started by hand",
        "state": state(record),
        noun(record): steps_words(record),
        "nodes": some(record.job.get("nodes") or record.hosts),
        "ranks": ranks_words(record),
        "granted": granted_words(record),
        "used": used_words(record),
        "time used": " ".join(time_words(record)).strip().replace(" ;", ";"),
        "restarts": restarts_words(record),
    }
    if valid_words(record):
        rows["validation and test"] = valid_words(record)
    if record.lives:
        share, hours = busy_words(record)
        rows["busy"] = f"{share}: {hours} granted. Most centres charge for what was granted"
    if (energy := energy_words(record)) is not None:
        rows["energy"] = energy
    if whys(record) and record.bill.energy_kwh is not None:
        rows["not measured"] = some(whys(record))
    rows |= {"data": str(about.get("config", {}).get("data", "-"))} | loss_rows(record)
    if peak := record.status.get("peak_bytes"):
        parts = some([f"{part} {scaled(nbytes, 'B')}" for part, nbytes in peak.items()])
        rows["tensors at their peak"] = f"{scaled(sum(peak.values()), 'B')} on rank 0: {parts}"
    rows |= record.status.get("notes", {})
    if speed is not None:
        rows["speed"] = f"{speed:,.0f} {record.unit}/s"
        if about.get("flops_per_token") and record.unit == "tokens":
            rows["model FLOP/s"] = scaled(speed * about["flops_per_token"], "FLOP/s")
    return rows


def tiles(record: Record) -> dict[str, tuple[str, str]]:
    """The numbers that one looks for first: name -> number and what it is of."""
    rows = summary(record)
    losses = loss_rows(record)
    word, _, more = rows["state"].partition(", ")
    found = {"state": (word, more), noun(record): (steps_words(record), "")}
    used, more = time_words(record)
    found["time"] = (used, more.removeprefix("; "))
    if record.speed() is not None:
        number, _, unit = rows["speed"].partition(" ")
        found["speed"] = (number, ", ".join([unit, rows.get("model FLOP/s", "")]).strip(", "))
    for name, words in list(losses.items())[-1:]:
        number, _, unit = words.partition(" ")
        found[name] = (number, unit)
    if record.lives:
        found["busy"] = busy_words(record)
    if "energy" in rows:
        number, _, more = rows["energy"].partition(" (")
        found["energy"] = (number, more.rstrip(")"))
    return found


def idle_lines(record: Record) -> list[str]:
    """Say which granted devices nobody used, and which ranks were idle."""
    lines = idle_words(record.ranks, record.job.get("nodes", ()))
    lines = [line[len("idle: ")].upper() + line[len("idle: ") + 1 :] + "." for line in lines]
    if not any(record.samples):
        return lines
    idle = []
    for rank, samples in enumerate(record.samples):
        if not samples:
            idle.append(f"Rank {rank} wrote no samples.")
    for device in record.devices:
        if device.rank is not None and device.busy and is_idle(device, record):
            share = mean_busy(device, record.paid)
            idle.append(f"Rank {device.rank} was idle: {share:.0%} busy on average.")
    if len(idle) > 6:
        idle = [*idle[:5], f"{len(idle) - 5} more ranks likewise."]
    return lines + idle


def is_idle(device: Device, record: Record) -> bool:
    """Was a rank's device busy for less than a tenth of the time that it wrote samples?"""
    own_s = integral([(time_s, 1.0) for time_s, _ in device.busy], record.lives)
    return integral(device.busy, record.lives) * max(1, device.num_cores) < IDLE_BELOW * own_s


# ---- the page ----------------------------------------------------------------------------------


def table(rows: Mapping[str, object]) -> str:
    """Rows of an HTML table; all text is escaped."""
    cells = ((html.escape(str(name)), html.escape(str(value))) for name, value in rows.items())
    return "\n".join(
        f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in cells
    )


def grid(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """An HTML table of several columns; all text is escaped."""
    top = "".join(f'<th scope="col">{html.escape(head)}</th>' for head in heads)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines)
    return f"<table><tr>{top}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def tile(name: str, number: str, more: str) -> str:
    """One number with its name; a state carries its colour."""
    kind = f' class="{number.split()[0]}{"-but" * bool(more)}"' if name == "state" else ""
    small = f"<small>{html.escape(more)}</small>" if more else ""
    return f"<div><dt>{html.escape(name)}</dt><dd{kind}>{html.escape(number)}{small}</dd></div>"


def card(picture: "Picture", is_wide: bool = False) -> str:
    """A figure with its title and its words, which also stand in for it; as wide as the page."""
    data = base64.b64encode(picture.png).decode()
    title = html.escape(picture.title)
    words = html.escape(picture.words, quote=True)
    kind = "card wide" if is_wide else "card"
    return (
        f'<section class="{kind}"><h2>{title}</h2><figure>'
        f'<img alt="{title}. {words}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure></section>"
    )


def finish(
    run: Run,
    model: nn.Module,
    valid_loss: float,
    live: Live,
    notes: Mapping[str, str] | None = None,
) -> float:
    """End a training job, on every rank: save rank 0's weights, tell, and write the report.

    Args:
        live: its highest count is told, and gets a row in the report.
        notes: more such rows, by name.

    Returns:
        valid_loss.
    """
    for words in (live.in_words(), *(notes or {}).values()):
        run.world.print(words)
    save_once(model, run.folder / "model.pt")
    run.finish(valid_loss, live.peak, notes)
    if run.world.is_main:
        run.world.print(f"report: {write_report(run.folder)}")
    return valid_loss


def write_report(folder: Path) -> Path:
    """Write `report.html`, `report.png` and every figure as a PNG; returns the page's path."""
    from manyhands.training import report_figures  # matplotlib: a second, and one rank draws

    record = read(folder)
    drawn = report_figures.pictures(record)
    idle = idle_lines(record)
    title = f"Run {folder.resolve().name}"
    rows = summary(record)
    lead = f"{rows['job']}: {rows['ranks']}; granted {rows['granted']}, used {rows['used']}"
    settings = dict(record.about.get("config", {}))
    settings |= {name: record.about[name] for name in ("torch", "backend") if name in record.about}
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in idle)
    page = PAGE.format(
        title=html.escape(title),
        lead=html.escape(lead),
        idle=f'<div class="idle">{paragraphs}</div>\n' if idle else "",
        tiles="\n".join(tile(name, *words) for name, words in tiles(record).items()),
        figures="\n".join(card(picture) for picture in drawn),
        job=table(rows),
        settings=table(settings),
    )
    for picture in drawn:
        (folder / f"report-{picture.name}.png").write_bytes(picture.png)
    numbers = [f"{name} {number}" for name, (number, _) in list(tiles(record).items())[1:]]
    numbers = [rows["speed"] if words.startswith("speed") else words for words in numbers]
    words = [lead, "   |   ".join(numbers), " ".join(idle)]
    picture = report_figures.slide(record, f"{title}: {rows['state']}", words)
    (folder / "report.png").write_bytes(picture)
    replace_file(folder / "report.html", page.encode())
    return folder / "report.html"
