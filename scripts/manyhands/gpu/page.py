"""The report of `make gpu`: a section for each part, with a sentence, a figure and its rows."""

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manyhands.gpu import figures
from manyhands.gpu.words import WORDS
from manyhands.instruments.figures import png
from manyhands.instruments.meters import duration, scaled
from manyhands.training.report import TOP, counted, grid, tile
from manyhands.training.storage import replace_file

FORMATS: dict[str, Callable] = {  # end of a column's name -> how its values are written
    "(s)": lambda value: f"{1e3 * value:,.2f} ms",
    "step_s": lambda value: f"{1e3 * value:,.2f} ms",
    "call_s": lambda value: f"{1e3 * value:,.3f} ms",
    "time_s": lambda value: f"{value:.1f} s",
    "flops_per_s": lambda value: scaled(value, "FLOP/s"),
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "bytes_per_s": lambda value: scaled(value, "B/s"),
    "bytes": lambda value: scaled(value, "B"),
    "utilisation": lambda value: f"{value:.1%}",
    "predicted": lambda value: scaled(value, "B"),
    "measured": lambda value: scaled(value, "B"),
    "loss by hand": lambda value: f"{value:.6f}",
    "loss native": lambda value: f"{value:.6f}",
}
NAMES = {  # of columns that do not speak for themselves
    "step_s": "step",
    "call_s": "time",
    "time_s": "time",
    "flops_per_s": "FLOP/s",
    "tokens_per_s": "tokens per second",
    "algorithm_bytes_per_s": "algorithm bandwidth",
    "bus_bytes_per_s": "bus bandwidth",
    "utilisation": "MFU",
    "peak_bytes": "peak",
    "size_bytes": "size",
    "by hand peak_bytes": "peak by hand",
    "native peak_bytes": "peak native",
    "by hand (s)": "step by hand",
    "native (s)": "step native",
    "what": "",
}


def write_page(folder: Path, result: Mapping) -> None:
    """Write `report.html` into the folder, with what has been measured so far."""
    title = f"Run {folder.resolve().name}"
    sections = [section(name, part, result) for name, part in result["parts"].items()]
    lines = [
        TOP.format(title=html.escape(title), lead=html.escape(lead(result))),
        f'<dl class="tiles">{"".join(tile(*one) for one in tiles(result))}</dl>',
        *sections,
        "</body></html>\n",
    ]
    replace_file(folder / "report.html", "\n".join(lines).encode())


def lead(result: Mapping) -> str:
    """What the numbers were taken on."""
    seen = result["machine"] or {}
    name = seen.get("name", result["device"])
    ranks = counted(result["ranks"], "rank")
    words = f"{ranks}, each on {name}; torch {result['torch']}, {result['date']}."
    if result["tiny"]:
        words += " Tiny models, to try the parts out: the times say nothing."
    return f"{words} Made by: {result['remake']}."


def tiles(result: Mapping) -> list[tuple[str, str, str]]:
    """Name, number and what it is of."""
    parts = result["parts"].values()
    done = sum(part["state"] == "done" for part in parts)
    found = [("parts done", f"{done} of {len(parts)}", "")]
    found.append(("time", duration(result["time_s"]), ""))
    rows = [row for part in parts for row in part["rows"] if "tokens_per_s" in row]
    if rows:
        best = max(rows, key=lambda row: row["flops_per_s"])
        found.append(("fastest training", scaled(best["flops_per_s"], "FLOP/s"), best["what"]))
        if "utilisation" in best:
            found.append(("model FLOPs utilisation", f"{best['utilisation']:.1%}", best["what"]))
    return found


def section(name: str, part: Mapping, result: Mapping) -> str:
    """One part: its heading, why it is not there, its sentence, figure and rows."""
    about = f"{part['state']} in {duration(part['time_s'])}, {counted(part['ranks'], 'rank')}"
    text = f'<section class="card wide"><h2>{html.escape(part["title"])}</h2>'
    text += f'<p class="lead">{html.escape(about)}</p>'
    if part["why"]:
        text += f'<p class="failed">{html.escape(part["why"])}</p>'
    if part["rows"]:
        words = WORDS.get(name, lambda *_: "")(part["rows"], result)
        text += f"<p>{html.escape(words)}</p>" if words else ""
        if (drawn := figures.draw(name, part["rows"])) is not None:
            data = base64.b64encode(png(drawn)).decode()
            alt = html.escape(f"{part['title']}. {words}", quote=True)
            image = f'<img alt="{alt}" src="data:image/png;base64,{data}">'
            text += f'<figure style="max-width: 46rem">{image}</figure>'
        text += table(part["rows"])
    return text + "</section>"


def table(rows: Sequence[Mapping]) -> str:
    """All rows, with every column that one of them has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns = [one for one in columns if any(row.get(one) not in (None, "") for row in rows)]
    lines = ([cell(one, row.get(one)) for one in columns] for row in rows)
    return grid([NAMES.get(one, one) for one in columns], lines)


def cell(column: str, value: object) -> str:
    """A value as its column writes it."""
    if value is None:
        return ""
    for end, write in FORMATS.items():
        if column.endswith(end):
            return write(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
