"""The report of `make gpu`: a section for each part, with a sentence, a figure and its rows."""

from collections.abc import Callable, Mapping
from pathlib import Path

from manyhands.gpu import figures
from manyhands.gpu.words import WORDS
from manyhands.instruments.figures import png
from manyhands.instruments.meters import duration, scaled
from manyhands.training.page import Card, Row, page
from manyhands.training.report import counted
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
    text = page(
        title=f"Run {folder.resolve().name}",
        lead=lead(result),
        tiles=tiles(result),
        cards=[card(name, part, result) for name, part in result["parts"].items()],
        is_wide=True,
    )
    replace_file(folder / "report.html", text.encode())


def lead(result: Mapping) -> str:
    """What the numbers were taken on."""
    seen = result["machine"] or {}
    name = seen.get("name", result["device"])
    ranks = counted(result["ranks"], "rank")
    words = f"{ranks}, each on {name}; torch {result['torch']}, {result['date']}."
    if result["tiny"]:
        words += " Tiny models, to try the parts out: the times say nothing."
    return f"{words} Made by: {result['remake']}."


def tiles(result: Mapping) -> dict[str, Row]:
    """The numbers that one looks for first."""
    parts = result["parts"].values()
    done = sum(part["state"] == "done" for part in parts)
    found = {"parts done": Row(f"{done} of {len(parts)}"), "time": Row(result["time_s"], "s")}
    rows = [row for part in parts for row in part["rows"] if "tokens_per_s" in row]
    if rows:
        best = max(rows, key=lambda row: row["flops_per_s"])
        found["fastest training"] = Row(best["flops_per_s"], "FLOP/s", best["what"])
        if "utilisation" in best:
            share = f"{best['utilisation']:.1%}"
            found["model FLOPs utilisation"] = Row(share, remark=best["what"])
    return found


def card(name: str, part: Mapping, result: Mapping) -> Card:
    """One part: how it went, or why it is not there; its sentence, figure and rows."""
    about = f"{part['state']} in {duration(part['time_s'])}, {counted(part['ranks'], 'rank')}"
    found = Card(part["title"], about=about, why=part["why"])
    if not (rows := part["rows"]):
        return found
    drawn = figures.draw(name, rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns = [one for one in columns if any(row.get(one) not in (None, "") for row in rows)]
    return found._replace(
        words=WORDS[name](rows, result) if name in WORDS else "",
        picture=b"" if drawn is None else png(drawn),
        heads=[NAMES.get(one, one) for one in columns],
        lines=[[cell(one, row.get(one)) for one in columns] for row in rows],
    )


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
