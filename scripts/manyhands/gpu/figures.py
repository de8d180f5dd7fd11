"""The figures of the report of `make gpu`, in the colours of the course."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyhands.gpu.peaks import GOAL
from manyhands.instruments.figures import BLACK, bars, label, legend_below, lines, new_figure

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))


def draw(name: str, rows: Sequence[Mapping]) -> Figure | None:
    """The figure of a part; None where it has none, or no numbers for one."""
    if name in ("speed", "compiled"):
        return draw_speed(rows)
    if name == "memory":
        return draw_memory(rows)
    if name == "bandwidth":
        return draw_bandwidth(rows)
    return None


def draw_speed(rows: Sequence[Mapping]) -> Figure | None:
    """Bars of the FLOP/s of each row, or of their share of the peak where that is known."""
    known = [row for row in rows if "flops_per_s" in row]
    if not known:
        return None
    figure, ax = new_figure(7, 2.8)
    names = [row["what"] for row in known]
    if all("utilisation" in row for row in known):
        shares = [100 * row["utilisation"] for row in known]
        bars(ax, {"compute": shares}, names, "share of the peak FLOP/s (%)")
        ax.axhline(100 * GOAL, color=BLACK, linestyle=(0, (2, 2)), linewidth=1.2)
        ax.text(0.99, 100 * GOAL + 1, "goal on an H100", ha="right", fontsize=9, **in_axes(ax))
    else:
        rates = [row["flops_per_s"] / 1e12 for row in known]
        bars(ax, {"compute": rates}, names, "TFLOP/s (10^12 per second)")
    return figure


def in_axes(ax: Axes) -> dict[str, object]:
    """Place a text across by the width of the axes, and up by its data."""
    return {"transform": ax.get_yaxis_transform(), "color": BLACK}


def draw_memory(rows: Sequence[Mapping]) -> Figure:
    """Bars of predicted and measured bytes of each part, one panel for each type of number."""
    kinds = list(dict.fromkeys(row["type"] for row in rows))
    both = [row for row in rows if "predicted" in row]
    most = max(row["measured"] for row in both)
    unit, size = next(one for one in UNITS if most >= one[1])
    figure, _ = new_figure(7.5, 2.3 * len(kinds), len(kinds), 1)
    for ax, kind in zip(figure.axes, kinds, strict=True):
        own = [row for row in both if row["type"] == kind]
        groups = {name: [row[name] / size for row in own] for name in ("predicted", "measured")}
        bars(ax, groups, [row["part"] for row in own], unit)
        ax.set_title(kind, fontsize=10, color=BLACK)
    legend_below(figure, figure.axes[0])
    return figure


def draw_bandwidth(rows: Sequence[Mapping]) -> Figure:
    """Bus bandwidth of each collective against the size of its tensor."""
    figure, ax = new_figure(7, 3.2)
    series = {}
    for kind in dict.fromkeys(row["what"] for row in rows):
        own = [row for row in rows if row["what"] == kind]
        sizes = [row["size_bytes"] for row in own]
        series[kind] = sizes, [row["bus_bytes_per_s"] / 1e9 for row in own]
    lines(ax, series, "size (bytes)", "bus bandwidth (GB/s)")
    ax.set_xscale("log")
    ax.set_yscale("log")
    label(ax, "size (bytes)", "bus bandwidth (GB/s)", legend=True)
    return figure
