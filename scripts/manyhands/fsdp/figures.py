"""Draws what lesson 10 measures."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure

from manyhands.fsdp.bench import Span, length_s
from manyhands.instruments import figures

LANES = {"forward": 0, "backward": 0, "gather": 1, "reduce": 2}  # the row of each
ROLES = {"gather": "communication", "reduce": "communication"}  # else a role by its own name


def steps_of_a_rank(versions: Mapping[str, Sequence[Span]]) -> Figure:
    """Draw a step of each version of FSDP: computing, and under it gathers and reductions.

    Both have one time axis. A box carries the number of its unit.
    """
    figure, axes = figures.new_figure(8, 1.2 + 1.7 * len(versions), rows=len(versions))
    longest_ms = 1e3 * max(map(length_s, versions.values()))
    for ax, (name, spans) in zip(figure.axes, versions.items(), strict=True):
        first_s = min(span.start_s for span in spans)
        drawn: set[str] = set()
        for lane, unit, start_s, stop_s in spans:
            role = ROLES.get(lane, lane)
            left_ms = 1e3 * (start_s - first_s)
            width_ms = 1e3 * (stop_s - start_s)
            look = {"color": figures.ROLE[role], "hatch": figures.HATCH.get(role)}
            legend = {} if role in drawn else {"label": role}
            ax.barh(LANES[lane], width_ms, 0.8, left_ms, edgecolor="white", **look, **legend)
            drawn.add(role)
            card = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            middle_ms = left_ms + width_ms / 2
            ax.text(middle_ms, LANES[lane], unit, ha="center", va="center", size=8, bbox=card)
        ax.set_title(f"{name}: {1e3 * length_s(spans):.0f} ms", fontsize=10)
        ax.set_yticks([0, 1, 2], ["compute", "gather", "reduce"])
        ax.set_xlim(0, 1.02 * longest_ms)
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        figures.label(ax, "time (ms)", "", legend=True)
    figures.legend_below(figure, figure.axes[0])
    return figure


def costs(
    peak_mb: Mapping[str, float],
    sent_mb: Mapping[str, float],
    times_ms: Mapping[str, Sequence[float]],
) -> Figure:
    """Draw each way to shard as a row: bars for its memory and traffic, a range for its times."""
    figure, axes = figures.new_figure(9, 3, cols=3)
    rows = range(len(peak_mb))
    axes[0].barh(rows, peak_mb.values(), color=figures.ROLE["weights"])
    axes[1].barh(rows, sent_mb.values(), color=figures.ROLE["communication"])
    for ax in axes[:2]:
        ax.bar_label(ax.containers[0], fmt="%.1f", fontsize=9, padding=2)
        ax.margins(x=0.15)
    for row, found in enumerate(times_ms.values()):
        middle = median(found)
        ends = [[middle - min(found)], [max(found) - middle]]
        axes[2].errorbar(middle, row, xerr=ends, fmt="o", color=figures.BLUE, capsize=3)
    axes[2].set_xlim(left=0)
    names = ("peak (MB per rank)", "sent per step (MB per rank)", "step (ms), median and range")
    for ax, name in zip(axes, names, strict=True):
        ax.set_yticks(rows, peak_mb if ax is axes[0] else [])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.grid(visible=False, axis="y")
        figures.label(ax, name, "")
    return figure
