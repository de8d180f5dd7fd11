"""The house style of every computed figure: one meaning per colour, and never colour alone.

The colours are those of Okabe and Ito, which people with any colour vision can tell apart. A role
keeps its colour and its hatch, a rank or an algorithm its colour, line and marker, over the whole
course. Figures are drawn on a white card, so they can also be read in a dark notebook. Nothing here
uses pyplot: widget callbacks may draw while a cell runs.
Source: https://jfly.uni-koeln.de/color/
"""

import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_hex, to_rgb
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from manyhands.instruments.replay import Round

BLACK = "#222222"
GREY = "#8c8c8c"
LIGHT_GREY = "#dedede"
BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
RED = "#d55e00"
PURPLE = "#cc79a7"
YELLOW = "#f0e442"

ROLE = {
    "compute": BLUE,
    "forward": BLUE,
    "backward": SKY,
    "communication": RED,
    "optimizer": GREEN,
    "data": ORANGE,
    "weights": BLUE,
    "gradients": SKY,
    "activations": PURPLE,
    "checkpoint": BLACK,
    "other": GREY,
    "idle": LIGHT_GREY,
}
HATCH = {"backward": "//", "communication": "xx", "optimizer": "..", "data": "\\\\"}
HATCH |= {"gradients": "//", "activations": "--"}
RANK = [BLUE, ORANGE, GREEN, RED, SKY, PURPLE, BLACK]
LINE = ["-", "--", "-.", ":"]
MARKER = ["o", "s", "^", "D", "v", "P", "X"]
SURFACE = "cividis"  # for heights: as good for any colour vision, and in grey
ALGORITHM = {  # colour, line and marker of everything whose name has this word in it
    "naive": (ORANGE, ":", "s"),
    "tree": (GREEN, "-.", "^"),
    "ring": (BLUE, "-", "o"),
    "server": (PURPLE, "--", "D"),
    "native": (BLACK, (0, (5, 1)), "X"),
}

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


def style(name: str, number: int = 0) -> dict[str, object]:
    """Colour, line and marker of the curve `name`, the `number`th of its figure.

    "ring", "all_reduce_ring" and "ring by hand" look alike: all are the ring.
    """
    words = re.split(r"[\W_]+", name)
    other = (RANK[number % len(RANK)], LINE[number % len(LINE)], MARKER[number % len(MARKER)])
    look = next((ALGORITHM[word] for word in words if word in ALGORITHM), other)
    return dict(zip(("color", "linestyle", "marker"), look, strict=True))


def lines(ax: Axes, series: Series, xlabel: str, ylabel: str, floor: float | None = None) -> None:
    """Draw each (x, y) of `series` as a line, and `floor` as a level that cannot be crossed."""
    for number, (name, (x, y)) in enumerate(series.items()):
        look = style(name, number) | ({} if len(x) <= 12 else {"marker": None})
        ax.plot(x, y, **look, markersize=4, linewidth=1.6, label=name)
    if floor is not None:
        ax.axhline(floor, color=BLACK, linestyle=(0, (2, 2)), linewidth=1.2, label="floor")
    label(ax, xlabel, ylabel, legend=len(series) > 1 or floor is not None)


def measured_and_predicted(
    ax: Axes, measured: Series, predicted: Series, xlabel: str, ylabel: str
) -> None:
    """Draw what was measured as points and what was predicted as lines, on logarithmic axes.

    A name that stands in both has one colour and one place in the legend.
    """
    for number, name in enumerate(measured | predicted):
        look = key = style(name, number)
        if name in predicted:
            ax.plot(*predicted[name], **look | {"marker": None}, linewidth=1.4)
        else:
            key = key | {"linestyle": "none"}
        if name in measured:
            ax.plot(*measured[name], **look | {"linestyle": "none"}, markersize=5)
        else:
            key = key | {"marker": None}
        ax.plot([], [], **key, markersize=5, linewidth=1.4, label=name)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")  # 20 and 50 in place of 2 x 10^1
    ax.yaxis.set_minor_formatter(NullFormatter())
    label(ax, xlabel, ylabel, legend=True)
    ax.get_legend().set_title("points: measured; lines: predicted", {"size": 9})


def steps_by_batch(
    ax: Axes,
    results: Sequence[Mapping],
    least: float,
    critical: float,
    noise_scale: float | None = None,
) -> None:
    """Draw the steps to a target against the batch size, with the range over seeds and the fit.

    Args:
        results: for each batch size its "batch", its "mean" steps, and the "steps" of each seed.
        least, critical: of the fit, least * (1 + critical / batch).
        noise_scale: the critical batch as predicted from gradients.
    """
    batches = [one["batch"] for one in results]
    means = [one["mean"] for one in results]
    below = [one["mean"] - min(one["steps"]) for one in results]
    above = [max(one["steps"]) - one["mean"] for one in results]
    ax.axvspan(batches[0], critical / 4, color=GREEN, alpha=0.12, lw=0, label="perfect scaling")
    ax.axvspan(4 * critical, batches[-1], color=ORANGE, alpha=0.15, lw=0, label="plateau")
    ax.axvline(critical, color=BLACK, ls="--", lw=1.2, label=f"critical batch {critical:.0f}")
    if noise_scale is not None:
        ax.axvline(noise_scale, color=RED, ls=":", lw=1.8, label=f"noise scale {noise_scale:.0f}")
    ax.errorbar(batches, means, [below, above], fmt="none", ecolor=BLUE, capsize=3)
    fine = [batches[0] * (batches[-1] / batches[0]) ** (part / 100) for part in range(101)]
    fitted = {"steps": (fine, [least * (1 + critical / batch) for batch in fine])}
    names = ("batch size (images)", "steps to the target")
    measured_and_predicted(ax, {"steps": (batches, means)}, fitted, *names)
    ax.get_legend().set_title("points: measured, with their range; line: fitted", {"size": 9})
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.9 * batches[0], 1.1 * batches[-1])
    ax.xaxis.set_major_formatter("{x:g}")


def remedies_compared(
    outcomes: Mapping[str, Sequence[Sequence]], classes: Sequence[Sequence[str]], target: float
) -> Figure:
    """Draw each way to train as a row: its error, and what it took to reach the target.

    Args:
        outcomes: for each name a row of (accuracy, steps, images, ...) of every seed; None for
            steps and images where the target was missed.
        classes: the names, the best first; those that tie stand together, on one band.
    """
    order = [name for group in classes for name in group]
    rows = {name: len(order) - 1 - number for number, name in enumerate(order)}
    figure, axes = new_figure(9, 1.2 + 0.3 * len(order), cols=3)
    errors = {name: [(100 - 100 * one[0],) for one in found] for name, found in outcomes.items()}
    _rows_of_ranges(axes[0], errors, 0, rows)
    _rows_of_ranges(axes[1], outcomes, 1, rows)
    _rows_of_ranges(axes[2], outcomes, 2, rows)
    axes[0].axvline(100 - 100 * target, color=RED, ls=":", lw=1.5, label="target")
    for ax, title in zip(
        axes,
        ("error on the test images (%)", "steps to the target", "images to the target"),
        strict=True,
    ):
        for group in classes[::2]:
            ends = rows[group[-1]] - 0.5, rows[group[0]] + 0.5
            ax.axhspan(*ends, color=LIGHT_GREY, alpha=0.5, lw=0, zorder=0)
        label(ax, title, "")
        ax.set(ylim=(-0.5, len(order) - 0.5), yticks=list(rows.values()), xscale="log")
        ax.set_yticklabels(order if ax is axes[0] else [])
        low, high = ax.get_xlim()
        margin = max(1, 10 * low / high) ** 0.5  # less than a decade has too many ticks
        ax.set_xlim(low / margin, high * margin)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    handles, names = axes[0].get_legend_handles_labels()
    title = "points: mean of the seeds, with their range; one band: each ties with its first"
    figure.legend(
        handles,
        names,
        title=title,
        fontsize=9,
        title_fontsize=9,
        frameon=False,
        loc="outside lower center",
    )
    return figure


def heat_map(
    ax: Axes, values: Sequence[Sequence[float]], rows: Sequence[str], xlabel: str, what: str
) -> None:
    """Draw a row of values for each of `rows` as colours on a logarithmic scale, with their key."""
    found = np.asarray(values, dtype=float)
    found = np.where(found > 0, found, np.nan)
    drawn = ax.pcolormesh(found, norm=LogNorm(), cmap="cividis")
    ax.set_yticks([row + 0.5 for row in range(len(rows))], rows, fontsize=8)
    ax.invert_yaxis()
    ax.grid(visible=False)
    ax.figure.colorbar(drawn, ax=ax, label=what)
    label(ax, xlabel, "")


def _rows_of_ranges(
    ax: Axes, values: Mapping[str, Sequence[Sequence]], column: int, rows: Mapping[str, int]
) -> None:
    """A point with its range in the row of each name; a word where a value is missing."""
    for name, row in rows.items():
        found = [one[column] for one in values[name]]
        if None in found:
            words = f"missed by {found.count(None)} of {len(found)}"
            ax.text(0.04, row, words, transform=ax.get_yaxis_transform(), va="center", size=9)
            continue
        mean = sum(found) / len(found)
        ends = [[mean - min(found)], [max(found) - mean]]
        ax.errorbar(mean, row, xerr=ends, fmt="o", color=BLUE, ecolor=BLUE, capsize=3, ms=5)


def stack(
    ax: Axes, x: Sequence[float], parts: Mapping[str, Sequence[float]], xlabel: str, ylabel: str
) -> None:
    """Stack the areas of `parts`, whose names are roles, over `x`."""
    areas = ax.stackplot(x, *parts.values(), labels=parts, colors=[ROLE[name] for name in parts])
    for name, area in zip(parts, areas, strict=True):
        area.set(hatch=HATCH.get(name, ""), edgecolor="white", linewidth=0)
    label(ax, xlabel, ylabel, legend=True)


def stacked_bars(
    ax: Axes, bars: Sequence[tuple[str, Mapping[str, float]]], ylabel: str, gap_every: int = 0
) -> None:
    """Draw one bar for each (name, parts); the parts are stacked, and their names are roles.

    After every `gap_every` bars comes a gap, so that those between two gaps are seen together.
    """
    x = [place + (place // gap_every * 0.6 if gap_every else 0) for place in range(len(bars))]
    bottom = [0.0] * len(bars)
    for part in dict.fromkeys(part for _, parts in bars for part in parts):
        heights = [parts.get(part, 0.0) for _, parts in bars]
        drawn = ax.bar(x, heights, 0.8, bottom, color=ROLE[part], label=part, edgecolor="white")
        for bar in drawn:
            bar.set_hatch(HATCH.get(part, ""))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, top in zip(x, bottom, strict=True):
        ax.text(place, top, f"{top:.3g}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks(x, [name for name, _ in bars])
    ax.grid(axis="x", visible=False)
    label(ax, "", ylabel, legend=True)


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
    title = ax.get_legend().get_title().get_text() if ax.get_legend() else ""
    for other in figure.axes:
        if other.get_legend():
            other.get_legend().remove()
    handles, names = ax.get_legend_handles_labels()
    look = {"fontsize": 9, "title_fontsize": 9, "frameon": False, "ncols": 4}
    figure.legend(handles, names, title=title or None, loc="outside lower center", **look)


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


def gantt(ax: Axes, spans: Sequence[Sequence[tuple]], scale: float = 1e3, unit: str = "ms") -> None:
    """Draw a pipeline's forwards and backwards, one row a rank; what stays grey is idle.

    Args:
        spans: of each rank ((kind, stage, micro-batch), start, stop); F or B is the kind. A box
            carries the number of its micro-batch, and a letter where a rank has several stages.
        scale: from the times to `unit`.
    """
    every = [span for mine in spans for span in mine]
    first = min(start for _, start, _ in every)
    last = max(stop for *_, stop in every)
    total = (last - first) * scale
    looks = {"F": "forward", "B": "backward"}
    several = max(stage for (_, stage, _), *_ in every) >= len(spans)
    for rank, mine in enumerate(spans):
        ax.barh(rank, total, color=ROLE["idle"], height=0.8, label="idle" if rank == 0 else None)
        for kind, role in looks.items():
            boxes = [(span, start, stop) for span, start, stop in mine if span[0] == kind]
            left = [(start - first) * scale for _, start, _ in boxes]
            width = [(stop - start) * scale for _, start, stop in boxes]
            look = {"color": ROLE[role], "hatch": HATCH.get(role), "edgecolor": "white"}
            name = role if rank == 0 else None
            ax.barh([rank] * len(boxes), width, left=left, height=0.8, label=name, **look)
            for ((_, stage, i), *_), x, w in zip(boxes, left, width, strict=True):
                words = f"{i}{'abcdefgh'[stage // len(spans)] if several else ''}"
                if w > 0.012 * len(words) * total:
                    text = {"color": "white" if kind == "F" else BLACK, "fontsize": 8}
                    ax.text(x + w / 2, rank, words, ha="center", va="center", **text)
    ax.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    ax.invert_yaxis()
    ax.set_xlim(0, total)
    ax.grid(visible=False)
    label(ax, f"time ({unit})", "", legend=True)


def contours(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    heights: Sequence,
    levels: Sequence[float],
    pale: bool = False,
    lines: Sequence[float] = (),
) -> QuadContourSet:
    """Draw a surface from above, dark where it is low; pale where a path is drawn over it.

    heights[i][j] is over x[i] and y[j]. From level to level is the same factor. The contours lie
    at `lines`; without them, at the levels.
    """
    look = {"levels": levels, "norm": LogNorm(levels[0], levels[-1])}
    columns = list(zip(*heights, strict=True))  # matplotlib wants a row for each y
    colours = LinearSegmentedColormap.from_list("pale", ["#b0b0b0", "#ffffff"])
    cmap = colours if pale else SURFACE
    filled = ax.contourf(x, y, columns, cmap=cmap, extend="both", **look)
    look["levels"] = lines or levels
    ax.contour(x, y, columns, colors=GREY if pale else "white", linewidths=0.5, **look)
    ax.grid(visible=False)
    return filled


def geometric(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high`; from each to the next is the same factor."""
    return [low * (high / low) ** (k / (count - 1)) for k in range(count)]


def loss_surfaces(surfaces: Mapping[str, Sequence], distances: Sequence[float]) -> Figure:
    """Each surface from above, all in one logarithmic scale; below it as a relief in its own scale.

    The first row compares the depths by colour, with contours in each surface's own scale. The
    second shows the loss itself, on which roughness is counted, and which the shared scale would
    flatten where one surface is much deeper.

    Args:
        surfaces: name -> losses; losses[i][j] is at distances[i] along the first direction and at
            distances[j] along the second.
    """
    everything = [loss for losses in surfaces.values() for row in losses for loss in row]
    low = min(everything)
    high = max(everything)
    levels = geometric(low, high, 15)
    figure = Figure(figsize=(8, 6.8), facecolor="white", layout="constrained")
    row = []
    for number, (name, losses) in enumerate(surfaces.items()):
        flat = figure.add_subplot(2, len(surfaces), number + 1)
        lowest, highest = min(map(min, losses)), max(map(max, losses))
        own = geometric(lowest, highest, 10) if lowest < highest else ()  # a dead network is level
        filled = contours(flat, distances, distances, losses, levels, lines=own)
        flat.set(aspect="equal")
        flat.set_title(name, fontsize=11, color=BLACK)
        flat.plot(0, 0, "x", color="white", markersize=7)
        label(flat, "along direction 1", "along direction 2")
        row.append(flat)
        relief = figure.add_subplot(2, len(surfaces), len(surfaces) + number + 1, projection="3d")
        one, other = np.meshgrid(distances, distances, indexing="ij")
        heights = np.asarray(losses, dtype=float)
        relief.plot_surface(one, other, heights, cmap=SURFACE, rcount=60, ccount=60)
        relief.set(xlabel="direction 1", ylabel="direction 2")
        relief.set_zlabel("loss (nats)")
        relief.set_title(f"{name}: in its own scale", fontsize=10, color=BLACK)
        relief.view_init(elev=32, azim=-55)
    bar = figure.colorbar(filled, ax=row, format="{x:.2g}")
    bar.set_label("loss (nats)", fontsize=10, color=BLACK)
    return figure


def draw_round(ax: Axes, state: Round, font_size: float = 10) -> None:
    """Draw the messages of one round and what every rank holds after it.

    A column is a rank, a row is a chunk; a cell names the ranks whose numbers are in the sum, and
    is the darker the more there are. A red edge marks what has just come.
    """
    num_ranks = len(state.held)
    arrived = {(message.receiver, message.chunk) for message in state.messages}
    for rank, held in state.held.items():
        for chunk, ranks in held.items():
            share = len(ranks) / num_ranks
            is_new = (rank, chunk) in arrived
            edge = {"edgecolor": RED if is_new else GREY, "linewidth": 2 if is_new else 0.8}
            face = to_hex([1 - share * (1 - part) for part in to_rgb(BLUE)])
            cell = Rectangle((rank - 0.37, chunk - 0.25), 0.74, 0.5, facecolor=face, **edge)
            ax.add_patch(cell)
            words = "+".join(map(str, sorted(ranks))) if share < 1 else "all"
            size = font_size * min(1, 5 / max(1, len(words)))
            look = {"ha": "center", "va": "center", "color": "white" if share == 1 else BLACK}
            ax.text(rank, chunk, words, fontsize=size, **look)
    for sender, receiver, chunk, _ in state.messages:
        ax.add_patch(_arrow(sender, receiver, chunk))
    ax.set(xlim=(-0.5, num_ranks - 0.5), ylim=(num_ranks - 0.6, -0.7), aspect=0.55)
    ax.set_xticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    ax.set_yticks(range(num_ranks), [f"chunk {chunk}" for chunk in range(num_ranks)])
    ax.tick_params(labelsize=font_size - 1, length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def _arrow(sender: int, receiver: int, chunk: int) -> FancyArrowPatch:
    """An arrow to the next column, or over the columns between."""
    distance = receiver - sender
    if distance in (1, -1):
        ends = ((sender + 0.39 * distance, chunk), (receiver - 0.35 * distance, chunk))
        bend = 0.0
    else:
        ends = ((sender, chunk - 0.25), (receiver, chunk - 0.25))
        bend = -0.33 / distance
    way = f"arc3,rad={bend}"
    look = {"color": RED, "linewidth": 1.4, "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
    return FancyArrowPatch(*ends, arrowstyle="-|>", connectionstyle=way, **look)


def rounds_overview(states: Sequence[Round]) -> Figure:
    """All rounds of a collective, from `replay.replay`, as small pictures side by side."""
    cols = min(3, len(states))
    rows = -(-len(states) // cols)
    figure, axes = new_figure(0.6 + 2.8 * cols, 2.1 * rows, rows, cols)
    for number, ax in enumerate(figure.axes):
        ax.set_visible(number < len(states))
        if number < len(states):
            draw_round(ax, states[number], font_size=32 / max(4, len(states[0].held)))
            ax.set_title(f"round {number}" if number else "start", fontsize=10, color=BLACK)
            ax.tick_params(labelleft=number % cols == 0)
    return figure


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


def show_rounds(states: Sequence[Round], alt: str) -> None:
    """Show all rounds at once and, where the notebook has widgets, a slider through them."""
    show(rounds_overview(states), alt)
    show_sliders(partial(_round_picture, states), "the rounds", round=range(len(states)))


def _round_picture(states: Sequence[Round], round: int) -> Figure:
    figure, ax = new_figure(6.5, 3.9)
    draw_round(ax, states[round])
    ax.set_title(f"round {round}" if round else "start", fontsize=11, color=BLACK)
    return figure


def show_sliders(draw: Callable[..., Figure], what: str, **choices: Sequence) -> None:
    """Where the notebook has widgets: a slider for each of `choices`, which redraw a figure.

    It comes beside a static figure that teaches the same: many servers lack the widgets.
    """
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        with suppress(ImportError):
            bundle = sliders(draw, **choices)._repr_mimebundle_()
            bundle["text/plain"] = f"a slider through {what}, where the notebook has widgets"
            ipython.display.display(bundle, raw=True)


def sliders(draw: Callable[..., Figure], **choices: Sequence) -> object:
    """An ipywidgets box: a slider for each of `choices`, and under them draw(name=choice, ...).

    A slider begins at the first of its choices. Each picture is drawn once.
    """
    import ipywidgets

    @cache
    def picture_of(*values: object) -> bytes:
        figure = draw(**dict(zip(choices, values, strict=True)))
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # once is enough
        return png(figure)

    rows = [
        ipywidgets.SelectionSlider(
            options=list(options),
            description=name.replace("_", " "),
            style={"description_width": "initial"},  # as wide as the name, which else is cut
            continuous_update=True,
        )
        for name, options in choices.items()
    ]
    picture = ipywidgets.Image(value=picture_of(*(row.value for row in rows)), format="png")
    for row in rows:
        row.observe(
            lambda _: setattr(picture, "value", picture_of(*(row.value for row in rows))), "value"
        )
    return ipywidgets.VBox([*rows, picture])
