"""Write the report of a run: what it did, how fast, and where the time and the machines went."""

import base64
import html
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from tyro.conf import Positional

from manyhands.figures import BLUE, GREEN, LIGHT_GREY, label, lines, new_figure, png, stack
from manyhands.meters import PHASES
from manyhands.runtime import BadInput, command_line
from manyhands.storage import FORMAT, read_json, read_lines

SILENT_AFTER_S = 60.0
IDLE_BELOW = 0.1
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --ink: #222; --paper: #f7f7f5; --line: #d5d5d0; --weak: #666 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e4; --paper: #1c1d1f; --line: #44464a; --weak: #a5a5a0 }} }}
body {{ margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }}
h1 {{ font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere }}
h2 {{ font-size: 1.1rem; margin: 1.5rem 0 .5rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; font-weight: normal; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }}
th {{ color: var(--weak); width: 40% }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 0 1.5rem }}
figure {{ margin: 0 }}
img {{ display: block; width: 100%; max-width: 30rem; background: #fff; border-radius: 6px }}
figcaption {{ margin: .4rem 0 0; max-width: 30rem }}
</style></head><body>
<h1>{title}</h1>
<table>{summary}</table>
<div class="cards">{figures}</div>
<h2>Settings</h2>
<table>{settings}</table>
</body></html>
"""


@dataclass(frozen=True)
class Config:
    """Write `report.html` into the folder of a run, also while the run goes on."""

    folder: Positional[str]
    """Folder of the run, such as runs/ddp-001."""


@dataclass(frozen=True)
class Record:
    """What a run's folder says."""

    about: dict  # config.json
    status: dict  # status.json, empty before the first step
    steps: list[dict]  # metrics.jsonl
    samples: list[list[dict]]  # of every rank

    def column(self, name: str) -> list[float]:
        """One quantity of metrics.jsonl, a value a step."""
        return [step[name] for step in self.steps]


@dataclass(frozen=True)
class Picture:
    """A figure of the report, with its sentence."""

    name: str
    title: str
    words: str
    png: bytes


def read(folder: Path) -> Record:
    """Read what is there of a run, finished or not.

    Raises:
        BadInput: `folder` is not the folder of a run.
    """
    if not folder.is_dir():
        raise BadInput(
            f"there is no folder {folder}: name the folder of a run, such as runs/ddp-001"
        )
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} holds no config.json: name the folder of a run")
    about = read_json(folder / "config.json")
    if about.get("format") != FORMAT:
        raise BadInput(f"{folder} is not the folder of a run of this version ({FORMAT})")
    status = folder / "status.json"
    files = [folder / "ranks" / f"rank-{rank:05d}.jsonl" for rank in range(len(about["ranks"]))]
    return Record(
        about=about,
        status=read_json(status) if status.exists() else {},
        steps=read_lines(folder / "metrics.jsonl"),
        samples=[read_lines(file) for file in files],
    )


# ---- words -------------------------------------------------------------------------------------


def state(record: Record) -> str:
    """How the run stands, in words; a run that was killed cannot say so itself."""
    word = record.status.get("state", "not started")
    signs_s = [rank[-1]["time_s"] for rank in record.samples if rank]
    silent_s = time.time() - max([*signs_s, record.status.get("time_s", 0.0)])
    if word == "running" and silent_s > SILENT_AFTER_S:
        return f"running, but silent for {duration(silent_s)}: probably killed"
    return word


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def scaled(value: float, unit: str) -> str:
    """A number with k, M, G, T or P before its unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def typical_speed(record: Record) -> float:
    """Median tokens per second; the first tenth of the steps warms up and is left out."""
    speeds = record.column("tokens_per_s")
    return median(speeds[len(speeds) // 10 :]) if speeds else 0.0


def summary(record: Record) -> dict[str, str]:
    """The table at the head of the report."""
    about, status, steps = record.about, record.status, record.steps
    done = steps[-1]["step"] if steps else 0
    devices = Counter(rank["device"].partition(":")[0] for rank in about["ranks"])
    hosts = len({rank["host"] for rank in about["ranks"]})
    loss = next((step["loss"] for step in reversed(steps) if step["loss"] is not None), None)
    speed = typical_speed(record)
    floor = "" if about["floor"] is None else f" (floor {about['floor']:.4f})"
    rows = {
        "job": about["identity"]["job"],
        "state": state(record),
        "steps": f"{done} of {about['config']['steps']}",
        "training time": duration(steps[-1]["time_s"]) if steps else "-",
        "ranks": f"{len(about['ranks'])} on {hosts} node{'s' if hosts > 1 else ''}",
        "device": ", ".join(f"{count} x {name}" for name, count in devices.items()),
        "data": str(about["config"]["data"]),
        "last training loss": "-" if loss is None else f"{loss:.4f} nats per token{floor}",
    }
    if status.get("valid_loss") is not None:
        rows["validation loss"] = f"{status['valid_loss']:.4f} nats per token{floor}"
    rows["speed"] = f"{speed:,.0f} tokens/s"
    if about["flops_per_token"]:
        rows["model FLOP/s"] = scaled(speed * about["flops_per_token"], "FLOP/s")
    return rows


def unused(record: Record) -> list[str]:
    """Say which GPUs were granted and not used, node by node."""
    words = []
    for host in sorted({rank["host"] for rank in record.about["ranks"]}):
        ranks = [rank for rank in record.about["ranks"] if rank["host"] == host]
        granted = max(rank["num_gpus"] for rank in ranks)
        idle = granted - sum(rank["device"].startswith("cuda") for rank in ranks)
        if idle > 0:
            words.append(f"{idle} of the {granted} GPUs granted on {host} had no rank.")
    return words


def busy(samples: Sequence[dict]) -> list[float]:
    """How busy a rank was: its GPU from 0 to 1 where it has one, else its number of busy cores."""
    return [s["cpu"] if s["gpu"] is None else s["gpu"] / 100 for s in samples]


def idle_words(record: Record) -> str:
    """Say which ranks were idle and which resources nobody used."""
    words = []
    for rank, samples in enumerate(record.samples):
        if not samples:
            words.append(f"Rank {rank} wrote no samples.")
        elif (mean := fmean(busy(samples))) < IDLE_BELOW:
            words.append(f"Rank {rank} was idle: {mean:.0%} busy on average.")
    if len(words) > 6:
        words = [*words[:5], f"{len(words) - 5} more ranks likewise."]
    if not words:
        lowest = min(fmean(busy(samples)) for samples in record.samples)
        words = [f"On average the least busy rank used {lowest:.0%} of one."]
    return " ".join([*words, *unused(record)])


# ---- figures -----------------------------------------------------------------------------------


def binned(values: Sequence[float], num_bins: int = 150) -> list[float]:
    """Means of neighbouring values, at most `num_bins` of them."""
    size = -(-len(values) // num_bins)
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def draw_loss(ax: Axes, record: Record) -> str:
    """Draw the loss of every step over the floor."""
    steps = [step for step in record.steps if step["loss"] is not None]
    x, y = [s["step"] for s in steps], [s["loss"] for s in steps]
    series, valid = {"training": (x, y)}, record.status.get("valid_loss")
    if valid is not None:
        series["validation"] = ([record.steps[-1]["step"]], [valid])
    lines(ax, series, "step", "loss (nats per token)", record.about["floor"])
    words = (
        f"Training loss from {y[0]:.3f} at step {x[0]} to {y[-1]:.3f} at step {x[-1]}." if y else ""
    )
    if len(steps) < len(record.steps):
        broken = next(step["step"] for step in record.steps if step["loss"] is None)
        words += f" The loss was not a finite number at step {broken}."
    if record.about["floor"] is not None:
        words += f" No model can go below the dotted line at {record.about['floor']:.3f}."
    return words.strip()


def draw_speed(ax: Axes, record: Record) -> str:
    """Draw the tokens per second of every step."""
    speed = record.column("tokens_per_s")
    lines(ax, {"tokens/s": (binned(record.column("step")), binned(speed))}, "step", "tokens/s")
    ax.set_ylim(0, 1.1 * max(speed))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    return f"A typical step ran at {typical_speed(record):,.0f} tokens/s."


def draw_split(ax: Axes, record: Record) -> str:
    """Draw where the time of a step went."""
    parts = {name: record.column(f"{name}_s") for name in PHASES}
    areas = {name: [1e3 * s for s in binned(spent_s)] for name, spent_s in parts.items()}
    stack(ax, binned(record.column("step")), areas, "step", "time of a step (ms)")
    total_s = sum(map(sum, parts.values()))
    shares = sorted(((sum(spent_s) / total_s, name) for name, spent_s in parts.items()))[::-1]
    words = ", ".join(f"{name} {share:.0%}" for share, name in shares)
    where = "backward and other hold" if len(record.samples) > 1 else "other holds"
    what = "the communication as well" if len(record.samples) > 1 else "the writing of numbers"
    return f"Share of the time: {words}; {where} {what}."


def draw_memory(ax: Axes, record: Record) -> str:
    """Draw the memory of every rank over time."""
    series, first_s = {}, start_s(record)
    for rank, samples in enumerate(record.samples):
        x = [sample["time_s"] - first_s for sample in samples]
        series[f"rank {rank}"] = (x, [sample["memory_bytes"] / 1e6 for sample in samples])
    lines(ax, series, "time (s)", "memory (MB)")
    if len(series) > 6 and ax.get_legend():
        ax.get_legend().remove()
    most = [max(y) for _, y in series.values() if y]
    ax.set_ylim(0, 1.1 * max(most))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    words = f"Most of all ranks {max(most):,.0f} MB, least {min(most):,.0f} MB."
    return words if len(most) > 1 else f"At most {most[0]:,.0f} MB."


def draw_busy(ax: Axes, record: Record) -> str:
    """Draw one row a rank: how busy it was over time."""
    everything = [value for samples in record.samples for value in busy(samples)]
    top, first_s = max([1.0, *everything]), start_s(record)
    for rank, samples in enumerate(record.samples):
        if samples:
            # A sample tells of the half second before it.
            x = [samples[0]["time_s"] - 0.5, *(sample["time_s"] for sample in samples)]
            y = [rank + 0.4 - 0.8 * value / top for value in busy(samples)]
            x = [max(0.0, moment - first_s) for moment in x]
            color = GREEN if samples[0]["gpu"] is not None else BLUE
            ax.fill_between(x, rank + 0.4, rank - 0.4, color=LIGHT_GREY, linewidth=0)
            ax.fill_between(x, rank + 0.4, [y[0], *y], step="pre", color=color, linewidth=0)
    step = max(1, len(record.samples) // 16)
    ranks = range(0, len(record.samples), step)
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(record.samples) - 0.5, -0.5)
    label(ax, "time (s)", "")
    on_gpu = any(samples and samples[0]["gpu"] is not None for samples in record.samples)
    full = (
        "one busy GPU"
        if on_gpu
        else ("one busy CPU core" if top == 1 else f"{top:.1f} busy CPU cores")
    )
    return f"A full row is {full}; grey is what was left unused. {idle_words(record)}"


def start_s(record: Record) -> float:
    """The common beginning of all ranks' samples, half a second before the first."""
    return min((rank[0]["time_s"] for rank in record.samples if rank), default=0.0) - 0.5


def pictures(record: Record) -> list[Picture]:
    """Draw every figure for which the run has numbers already."""
    height = 1.2 + 0.22 * max(8, len(record.samples))
    plan: list[tuple[str, str, float, bool, Callable]] = [
        ("loss", "Loss", 3.0, bool(record.steps), draw_loss),
        ("speed", "Tokens per second", 3.0, bool(record.steps), draw_speed),
        ("split", "Where the time went", 3.0, bool(record.steps), draw_split),
        ("memory", "Memory", 3.0, any(record.samples), draw_memory),
        ("ranks", "How busy each rank was", height, any(record.samples), draw_busy),
    ]
    drawn = []
    for name, title, inches, possible, draw in plan:
        if possible:
            figure, ax = new_figure(width=4.6, height=inches)
            words = draw(ax, record)
            drawn.append(Picture(name, title, words, png(figure, dpi=170)))
    return drawn


# ---- the page ----------------------------------------------------------------------------------


def table(rows: dict[str, object]) -> str:
    """Rows of an HTML table; all text is escaped."""
    cells = ((html.escape(str(name)), html.escape(str(value))) for name, value in rows.items())
    return "\n".join(
        f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in cells
    )


def card(picture: Picture) -> str:
    """A figure with its title and its words, which also stand in for it."""
    data = base64.b64encode(picture.png).decode()
    words = html.escape(picture.words, quote=True)
    return (
        f"<section><h2>{picture.title}</h2><figure>"
        f'<img alt="{picture.title}. {words}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure></section>"
    )


def write_report(folder: Path) -> Path:
    """Write `report.html`, and every figure as a PNG beside it; returns the page's path."""
    record = read(folder)
    drawn = pictures(record)
    settings = {**record.about["config"], "torch": record.about["torch"]}
    settings["backend"] = record.about["backend"]
    settings["nodes"] = ", ".join(sorted({rank["host"] for rank in record.about["ranks"]}))
    page = PAGE.format(
        title=html.escape(f"Run {folder.resolve().name}"),
        summary=table(summary(record)),
        figures="\n".join(card(picture) for picture in drawn),
        settings=table(settings),
    )
    for picture in drawn:
        (folder / f"report-{picture.name}.png").write_bytes(picture.png)
    partial = folder / "report.html.partial"
    partial.write_text(page, encoding="utf-8")
    return partial.replace(folder / "report.html")


def main(config: Config) -> None:
    """Write the report and say where it lies."""
    try:
        print(f"report: {write_report(Path(config.folder))}")
    except OSError as error:
        raise BadInput(f"cannot write the report: {error}") from None


if __name__ == "__main__":
    command_line(main, Config)
