"""Pictures of simulated steps: time lines of ranks, and scaling to many ranks."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from manyhands.instruments import figures
from manyhands.simulator.clock import Replay, Summary
from manyhands.simulator.traffic import Span

LEAST = 2e-3  # of the whole time: shorter gaps between spans of one role are drawn over


def replays(rows: Mapping[str, Replay], ranks: Sequence[int]) -> Figure:
    """A time line of some of the ranks for each replay, all on one time axis.

    Args:
        rows: title -> replay; the step's time is added to the title.
        ranks: those to draw, in the order from above.
    """
    longest_s = max(max(one.stop_s) for one in rows.values())
    height = len(rows) * (0.75 + 0.42 * len(ranks))
    figure, axes = figures.new_figure(9, 0.5 + height, rows=len(rows))
    for ax, (title, one) in zip(figure.axes, rows.items(), strict=True):
        spans = [
            (row, role, start_s, stop_s)
            for row, rank in enumerate(ranks)
            for _, role, start_s, stop_s in merged(one.spans[rank], LEAST * longest_s)
        ]
        figures.timeline(ax, sorted(spans, key=lambda span: span[1] != "idle"))
        ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        ax.set_xlim(0, 1e3 * longest_s)
        for bar in ax.patches:
            bar.set_linewidth(0.3)  # an edge would cover a short span
        words = f"{title}: {len(one.spans)} ranks, {1e3 * max(one.stop_s):,.1f} ms a step"
        ax.set_title(words, fontsize=10, color=figures.BLACK)
        ax.label_outer()
    figures.legend_below(figure, figure.axes[0])
    return figure


def merged(spans: Sequence[Span], least_s: float) -> list[Span]:
    """Spans of one role that follow each other within `least_s`, as one; fewer boxes to draw."""
    found: list[Span] = []
    last: dict[str, int] = {}
    for rank, role, start_s, stop_s in sorted(spans, key=lambda span: span[2]):
        place = last.get(role)
        if place is not None and start_s - found[place][3] <= least_s:
            found[place] = (rank, role, found[place][2], max(stop_s, found[place][3]))
        else:
            last[role] = len(found)
            found.append((rank, role, start_s, stop_s))
    return found


def against_ranks(counts: Sequence[int], found: Mapping[str, Sequence[Summary]]) -> Figure:
    """The time of a step, and how much of it is exposed communication, by the number of ranks.

    Args:
        found: name of a network -> the summary of a step on each number of ranks.
    """
    figure, (left, right) = figures.new_figure(9, 3.6, cols=2)
    steps = {name: (counts, [1e3 * one.step_s for one in many]) for name, many in found.items()}
    figures.lines(left, steps, "ranks", "time of a step (ms)")
    shares = {
        name: (counts, [100 * sum(one.exposed_s.values()) / one.step_s for one in many])
        for name, many in found.items()
    }
    figures.lines(right, shares, "ranks", "exposed communication (%)")
    for ax, top in ((left, 1.1 * max(max(y) for _, y in steps.values())), (right, 100)):
        powers_of_two(ax, counts)
        ax.set_ylim(0, top)
    figures.legend_below(figure, left)
    return figure


def powers_of_two(ax: Axes, counts: Sequence[int]) -> None:
    """Put the counts on a logarithmic axis, each with its number."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_formatter(NullFormatter())
