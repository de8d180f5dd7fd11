"""A page of numbers and pictures, for a browser without a network: the report of a run, or of many.

    rows and cards --page.html--> HTML

A number stays a number until here: `Row` says how it is written.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from manyhands.instruments.meters import duration, scaled


class Row(NamedTuple):
    """One line of a report, or one of the large numbers at its top."""

    value: float | str
    unit: str = ""
    remark: str = ""  # what it is of, or why

    @property
    def written(self) -> tuple[str, str]:
        """The value in words, and the unit where it is not among them."""
        match self.value, self.unit:
            case str(words), unit:
                return words, unit
            case seconds, "s":
                return duration(seconds), ""
            case share, "%":
                return f"{share:.0%}", ""
            case value, "B" | "FLOP/s" as unit:
                return scaled(value, unit), ""
            case value, "kWh":
                return f"{value:.3g} kWh", ""
            case value, "GPU-hours" | "core-hours" as unit:
                return f"{value:.2g}", unit
            case speed, unit if unit.endswith("/s"):
                return f"{speed:,.0f}", unit
        return f"{self.value:.4f}" if self.value < 10 else f"{self.value:.1f}", self.unit

    @property
    def small(self) -> str:
        """What stands below the number: the unit and the remark."""
        return ", ".join(filter(None, [self.written[1], self.remark]))

    def __str__(self) -> str:
        """The whole line: "1.2500 nats per token, floor 0.5000"."""
        return ", ".join(filter(None, [" ".join(self.written).strip(), self.remark]))


class Card(NamedTuple):
    """A figure and a table, or one of them, with its title and words."""

    title: str = ""
    words: str = ""  # they also stand in for the figure
    picture: bytes = b""  # PNG
    heads: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    about: str = ""  # how it was made
    why: str = ""  # why there is nothing to see

    @property
    def source(self) -> str:
        """The picture as a part of the page."""
        return f"data:image/png;base64,{base64.b64encode(self.picture).decode()}"


def page(
    title: str,
    lead: str,
    tiles: Mapping[str, Row],
    cards: Sequence[Card],
    is_wide: bool = False,
    warnings: Sequence[str] = (),
    tables: Mapping[str, Mapping[str, object]] | None = None,
) -> str:
    """The page as HTML; all text is escaped.

    Args:
        lead: a line below the title.
        tiles: the numbers that one looks for first.
        is_wide: each card is as wide as the page.
        tables: by title, rows that one can unfold; the first are unfolded.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # one rank writes

    loader = FileSystemLoader(Path(__file__).parent)
    html = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return html.get_template("page.html").render(
        title=title,
        lead=lead,
        tiles=tiles,
        cards=cards,
        is_wide=is_wide,
        warnings=warnings,
        tables=tables or {},
    )
