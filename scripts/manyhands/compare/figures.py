"""The ways side by side: a table, and a figure of memory, messages and time."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyhands.compare.measure import PARTS
from manyhands.instruments.figures import (
    BLACK,
    GREY,
    HATCH,
    LIGHT_GREY,
    RED,
    ROLE,
    label,
    new_figure,
)

# Gathered weights are weights that came by message.
LOOK = {part: (ROLE[part], HATCH.get(part, "")) for part in PARTS if part in ROLE}
LOOK["gathered"] = (ROLE["weights"], HATCH["communication"])
OPS = {  # all are communication; the hatch tells which
    "all_reduce": (RED, ""),
    "all_gather": (RED, "//"),
    "reduce_scatter": (RED, "xx"),
    "send": (RED, ".."),
    "more by gloo": (LIGHT_GREY, "\\\\"),
}
HEAD = [
    "way",
    *PARTS,
    "peak",
    "sent",
    "by gloo",
    "median",
    "quietest",
    "loss off by",
]
UNITS = ["", *["MB"] * (len(PARTS) + 3), "ms", "ms", "nats"]
BUSY = (
    "The times of the steps vary a lot, so something else was probably running on this machine. "
    "Compare the quietest steps, or run it again when nothing else runs."
)


def rows(found: Mapping) -> list[list[str]]:
    """The table of what `measure.compare` returned: names, units, then a row for each way."""
    lines = [HEAD, UNITS]
    for name, one in found["ways"].items():
        sizes = [*(one["parts"][part] for part in PARTS), one["peak"]]
        sizes += [sum(one["sent"].values()), one["sent_by_gloo"]]
        times = [one["median_s"], one["quietest_s"]]
        cells = [f"{size / 1e6:.2f}" for size in sizes] + [f"{1e3 * t:.1f}" for t in times]
        lines.append([name, *cells, f"{one['difference']:.0e}"])
    return lines


def table(found: Mapping) -> str:
    """The same as text, one line per way, with what the numbers mean."""
    widths = [max(map(len, column)) for column in zip(*rows(found), strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows(found)
    ]
    return "\n".join([*lines, *notes(found)])


def notes(found: Mapping) -> list[str]:
    """What the numbers mean: on what they were taken, and whether the times can be trusted."""
    setting = found["setting"]
    words = [
        f"{found['ranks']} ranks ({found['backend']}), {setting['layers']} layers, "
        f"{setting['batch']} x {setting['block']} tokens a step, {setting['micro_batches']} "
        f"micro-batches; memory of the rank that holds most, messages of the rank that sends "
        f"most, times of the slowest rank over {found['steps']} steps"
    ]
    return words + ([BUSY] if found["is_busy"] else [])


def draw(found: Mapping) -> Figure:
    """Memory by part, bytes sent by collective, and time of a step: a row for each way."""
    ways = found["ways"]
    figure, (memory, messages, time) = new_figure(11, 1.6 + 0.34 * len(ways), cols=3)
    parts = {name: in_mb(one["parts"]) for name, one in ways.items()}
    stacked_rows(memory, parts, LOOK)
    peaks = [one["peak"] / 1e6 for one in ways.values()]
    marker = {"marker": "|", "markersize": 13, "markeredgewidth": 2, "linestyle": "none"}
    memory.plot(peaks, range(len(ways)), color=BLACK, label="peak of all", **marker)
    label(memory, "memory of a rank (MB)", "", legend=True)
    sent = {name: in_mb(one["sent"]) for name, one in ways.items()}
    if found["backend"] == "gloo":
        for name, one in ways.items():
            sent[name]["more by gloo"] = one["sent_by_gloo"] / 1e6 - sum(sent[name].values())
    stacked_rows(messages, sent, OPS)
    label(messages, "sent by a rank in a step (MB)", "", legend=True)
    medians = [1e3 * one["median_s"] for one in ways.values()]
    time.barh(range(len(ways)), medians, 0.7, color=GREY, edgecolor="white", label="median")
    quietest = [1e3 * one["quietest_s"] for one in ways.values()]
    time.plot(quietest, range(len(ways)), color=BLACK, label="quietest", **marker)
    label(time, "time of a step (ms)", "", legend=True)
    for ax in (memory, messages, time):
        ax.set_yticks(range(len(ways)), list(ways) if ax is memory else [""] * len(ways))
        ax.set_ylim(len(ways) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        if ax.get_legend_handles_labels()[0]:  # one process sends nothing
            ax.legend(
                fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17)
            )
    return figure


def in_mb(nbytes: Mapping[str, int]) -> dict[str, float]:
    return {name: value / 1e6 for name, value in nbytes.items()}


def stacked_rows(
    ax: Axes, bars: Mapping[str, Mapping[str, float]], looks: Mapping[str, tuple[str, str]]
) -> None:
    """One horizontal bar for each of `bars`, its parts one after the other in the order of `looks`.

    A part that is nowhere more than nothing gets no place in the legend.
    """
    left = [0.0] * len(bars)
    for part, (color, hatch) in looks.items():
        widths = [parts.get(part, 0.0) for parts in bars.values()]
        if max(widths) <= 0:
            continue
        look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        ax.barh(range(len(bars)), widths, 0.7, left, label=part.replace("_", "-"), **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]


def in_words(found: Mapping) -> str:
    """What the figure shows, for those who cannot see it."""
    each = [
        f"{name}: {sum(one['parts'].values()) / 1e6:.1f} MB, sends "
        f"{sum(one['sent'].values()) / 1e6:.1f} MB"
        for name, one in found["ways"].items()
    ]
    return f"Bars of memory, messages and time of each way. {'; '.join(each)}."
