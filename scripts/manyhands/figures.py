"""The house style of every computed figure: one meaning per colour, and never colour alone.

The colours are those of Okabe and Ito, which people with any colour vision can tell apart. A role
keeps its colour and its hatch, a rank its colour, line and marker, over the whole course. Figures
are drawn on a white card, so they can also be read in a dark notebook. Nothing here uses pyplot:
widget callbacks may draw while a cell runs.
Source: https://jfly.uni-koeln.de/color/
"""

import io
import sys
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

BLACK, GREY, LIGHT_GREY = "#222222", "#8c8c8c", "#dedede"
BLUE, SKY, GREEN, ORANGE = "#0072b2", "#56b4e9", "#009e73", "#e69f00"
RED, PURPLE, YELLOW = "#d55e00", "#cc79a7", "#f0e442"

ROLE = {
    "compute": BLUE,
    "forward": BLUE,
    "backward": SKY,
    "communication": RED,
    "optimizer": GREEN,
    "data": ORANGE,
    "parameters": BLUE,
    "gradients": SKY,
    "activations": PURPLE,
    "other": GREY,
    "idle": LIGHT_GREY,
}
HATCH = {"backward": "//", "communication": "xx", "optimizer": "..", "data": "\\\\"}
HATCH |= {"gradients": "//", "activations": "--"}
RANK = [BLUE, ORANGE, GREEN, RED, SKY, PURPLE, BLACK]
LINE = ["-", "--", "-.", ":"]
MARKER = ["o", "s", "^", "D", "v", "P", "X"]

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def new_figure(
    width: float = 7, height: float = 3.2, rows: int = 1, cols: int = 1
) -> tuple[Figure, object]:
    """Make an empty figure of `width` x `height` inches.

    Returns:
        The figure and its Axes, as `Figure.subplots` gives them: one, or an array of them.
    """
    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    axes = figure.subplots(rows, cols)
    for ax in figure.axes:
        ax.set_facecolor("white")
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color=LIGHT_GREY, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=9, colors=BLACK)
    return figure, axes


def label(ax: Axes, xlabel: str, ylabel: str, legend: bool = False) -> None:
    """Name both axes, with their units, and add a legend under the plot."""
    ax.set_xlabel(xlabel, fontsize=10, color=BLACK)
    if xlabel in ("step", "epoch", "ranks"):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel(ylabel, fontsize=10, color=BLACK)
    if legend:
        # Below the axes a legend can never cover the data.
        ax.legend(
            fontsize=9, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2)
        )


def lines(ax: Axes, series: Series, xlabel: str, ylabel: str, floor: float | None = None) -> None:
    """Draw each (x, y) of `series` as a line, and `floor` as a level that cannot be crossed."""
    for number, (name, (x, y)) in enumerate(series.items()):
        ax.plot(
            x,
            y,
            color=RANK[number % len(RANK)],
            linestyle=LINE[number % len(LINE)],
            marker=MARKER[number % len(MARKER)] if len(x) <= 12 else None,
            markersize=4,
            linewidth=1.6,
            label=name,
        )
    if floor is not None:
        ax.axhline(floor, color=BLACK, linestyle=(0, (2, 2)), linewidth=1.2, label="floor")
    label(ax, xlabel, ylabel, legend=len(series) > 1 or floor is not None)


def stack(
    ax: Axes, x: Sequence[float], parts: Mapping[str, Sequence[float]], xlabel: str, ylabel: str
) -> None:
    """Stack the areas of `parts`, whose names are roles, over `x`."""
    areas = ax.stackplot(x, *parts.values(), labels=parts, colors=[ROLE[name] for name in parts])
    for name, area in zip(parts, areas, strict=True):
        area.set(hatch=HATCH.get(name, ""), edgecolor="white", linewidth=0)
    label(ax, xlabel, ylabel, legend=True)


def bars(
    ax: Axes, groups: Mapping[str, Sequence[float]], names: Sequence[str], ylabel: str
) -> None:
    """Draw one cluster of bars for each of `names`, with one bar of every group in it."""
    width = 0.8 / len(groups)
    for number, (group, heights) in enumerate(groups.items()):
        x = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(names))]
        color = ROLE.get(group, RANK[number % len(RANK)])
        drawn = ax.bar(x, heights, width, color=color, label=group, edgecolor="white")
        for bar in drawn:
            bar.set_hatch(["", "//", "..", "xx"][number % 4])
        ax.bar_label(drawn, fmt="%.3g", fontsize=9, padding=2)
    ax.set_xticks(range(len(names)), names)
    label(ax, "", ylabel, legend=len(groups) > 1)


def legend_below(figure: Figure, ax: Axes) -> None:
    """Give all axes of the figure one legend, that of `ax`, under the plots."""
    for other in figure.axes:
        if other.get_legend():
            other.get_legend().remove()
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=9, frameon=False, ncols=4, loc="outside lower center")


def timeline(ax: Axes, spans: Iterable[tuple[int, str, float, float]]) -> None:
    """Draw what every rank did when, one row a rank, rank 0 on top.

    Messages get a lane of their own below the rank's work, since both can go on at once.

    Args:
        spans: (rank, role, start_s, stop_s). A role may carry a text for its bar: "forward 3".
            What is given later is drawn over what is given earlier.
    """
    spans = list(spans)
    first_s = min((start for _, _, start, _ in spans), default=0.0)
    drawn: set[str] = set()
    two_lanes = any(role.startswith("communication") for _, role, *_ in spans)
    for rank, role, start, stop in spans:
        role, _, text = role.partition(" ")
        lane = (0.2 if role == "communication" else -0.17) if two_lanes else 0
        ax.barh(
            rank + lane,
            (stop - start) * 1e3,
            left=(start - first_s) * 1e3,
            height=0.34 if two_lanes else 0.7,
            color=ROLE[role],
            hatch=HATCH.get(role),
            edgecolor="white",
            label=None if role in drawn else role,
        )
        drawn.add(role)
        if text:
            middle_ms = ((start + stop) / 2 - first_s) * 1e3
            card = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            ax.text(middle_ms, rank + lane, text, ha="center", va="center", fontsize=8, bbox=card)
    ranks = sorted({rank for rank, *_ in spans})
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    label(ax, "time (ms)", "", legend=True)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def show(figure: Figure, alt: str) -> None:
    """Show the figure in a notebook, with `alt` for those who cannot see it; else print `alt`."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        print(f"figure: {alt}")
        return
    ipython.display.display(ipython.display.Image(png(figure), format="png", alt=alt))
