"""Pictures of lesson 12: charts of a pipeline on one time axis, and its bubble by micro-batches."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manyhands.instruments import figures
from manyhands.pipeline.bench import Sweep
from manyhands.pipeline.bubble import Span, bubble, idle_share

Spans = Sequence[Sequence[Span]]  # of each rank


def charts(rows: Mapping[str, Spans], scale: float = 1e3, unit: str = "ms") -> Figure:
    """One chart below the other, all on one time axis, each with its idle share in the title.

    Args:
        rows: title -> for each rank its spans, as `simulate` and `Pipeline.spans` give them.
        scale: from the times to `unit`.
    """
    height = sum(0.9 + 0.3 * len(spans) for spans in rows.values())
    figure, axes = figures.new_figure(9, 0.4 + height, rows=len(rows))
    axes = [axes] if len(rows) == 1 else axes
    for ax, (title, spans) in zip(axes, rows.items(), strict=True):
        figures.gantt(ax, spans, scale, unit)
        ax.set_title(f"{title}: idle {idle_share(spans):.0%} of the time", fontsize=10)
    one_axis(axes)
    figures.legend_below(figure, axes[-1])
    return figure


def one_axis(axes: Sequence[Axes]) -> None:
    """Let all charts end where the longest one ends."""
    last = max(ax.get_xlim()[1] for ax in axes)
    for ax in axes:
        ax.set_xlim(0, last)


def bubble_by_micro_batches(p: int, shares: Mapping[int, float]) -> Figure:
    """The two formulas as lines, and measured idle shares of the time that passes as points."""
    counts = list(shares)
    of_total = [100 * share for share in shares.values()]
    of_ideal = [100 * share / (1 - share) for share in shares.values()]
    names = ("% of the time that passes", "% of the ideal time")
    fine = range(1, 2 * max(counts) + 1)
    lines = [[100 * float(bubble(p, m)[which]) for m in fine] for which in (1, 0)]
    figure, ax = figures.new_figure(7, 3.6)
    measured = {name: (counts, y) for name, y in zip(names, (of_total, of_ideal), strict=True)}
    formula = {name: (fine, y) for name, y in zip(names, lines, strict=True)}
    title = f"bubble on {p} ranks (%)"
    figures.measured_and_predicted(ax, measured, formula, "micro-batches", title)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    return figure


def sweep(found: Sweep, p: int) -> Figure:
    """A step's time by the number of micro-batches, measured and predicted.

    The second line is a stage's work alone; the prediction adds the bubble, (p - 1)/m of it.
    """
    counts = list(found.work_s)
    work_ms = [1e3 * found.work_s[m] for m in counts]
    guess_ms = [1e3 * found.work_s[m] * float(1 + bubble(p, m)[0]) for m in counts]
    measured = {"a step in the pipeline": (counts, [1e3 * found.step_s[m] for m in counts])}
    lines = {
        "a step in the pipeline": (counts, guess_ms),
        "the work of a stage alone, measured": (counts, work_ms),
    }
    figure, ax = figures.new_figure(7, 3.6)
    name = "micro-batches, into which a batch of 32 sequences is cut"
    figures.measured_and_predicted(ax, measured, lines, name, "time of a step (ms)")
    title = "points: measured; solid line: predicted from the dashed one"
    ax.get_legend().set_title(title, {"size": 9})
    ax.set_xscale("log", base=2)
    ax.set_yscale("linear")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter("{x:g}")
    return figure


def zero_bubble(plain: Spans, split: Spans) -> Figure:
    """1F1B above, and below it a schedule whose backwards are split, in units of a forward.

    Args:
        plain: spans of forwards (F) and backwards (B).
        split: spans of forwards, of backwards for the input (I) and for the weights (W).
    """
    figure, axes = figures.new_figure(9, 4.2, rows=2)
    figures.gantt(axes[0], plain, 1, "units of a forward")
    urgent = [
        [((kind.replace("I", "B"), stage, i), *times) for (kind, stage, i), *times in mine]
        for mine in split
    ]
    figures.gantt(axes[1], urgent, 1, "units of a forward")
    for rank, mine in enumerate(split):
        late = [(action, start, stop) for action, start, stop in mine if action[0] == "W"]
        look = {"color": figures.YELLOW, "hatch": "..", "edgecolor": "white", "height": 0.8}
        name = "backward for the weights" if rank == 0 else None
        for (_, _, i), start, stop in late:
            axes[1].barh(rank, stop - start, left=start, label=name, **look)
            axes[1].text((start + stop) / 2, rank, i, ha="center", va="center", fontsize=8)
            name = None
    for bars in axes[1].containers:
        if bars.get_label() == "backward":
            bars.set_label("backward; below, for the input only")
    for ax, name, spans in zip(axes, ("1F1B", "zero-bubble"), (plain, split), strict=True):
        ax.set_title(f"{name}: idle {idle_share(spans):.0%} of the time", fontsize=10)
    one_axis(axes)
    figures.legend_below(figure, axes[1])
    return figure
