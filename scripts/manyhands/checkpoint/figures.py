"""Draws what lesson 11 measures."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from manyhands.checkpoint.interval import Spent, expected_goodput, young_daly
from manyhands.instruments import figures
from manyhands.programs.killed import Costs, Run, by_chance

# What the time of a run goes to: its name in the legend, colour, hatch.
SPENT = {
    "useful": ("useful steps", figures.ROLE["compute"], ""),
    "saving": ("saving", figures.ROLE["checkpoint"], ""),
    "again": ("steps done again", figures.YELLOW, "//"),
    "restarting": ("detecting and restarting", figures.ROLE["idle"], ""),
}


def by_interval(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """The runs of each interval, the shortest interval first."""
    found = defaultdict(list)
    for run in sorted(runs):
        found[run.interval].append(run)
    return dict(found)


def goodput_by_interval(runs: Sequence[Run], costs: Costs, mtbf_s: float, num_steps: int) -> Figure:
    """Draw goodput and the time by cause of runs of `num_steps` against the interval of saves.

    Left: each interval's runs and their common goodput, the formula's curve, and the range in which
    nine of ten imagined runs lie that differ in their kills only. Right: where the time went.
    """
    figure, (left, right) = figures.new_figure(9.5, 4.2, cols=2)
    found = by_interval(runs)
    at_ms = [1e3 * costs.step_s * interval for interval in found]
    draw_chance(left, at_ms, [by_chance(costs, k, num_steps, mtbf_s) for k in found])
    draw_formula(left, at_ms, costs, mtbf_s)
    draw_measured(left, at_ms, list(found.values()))
    left.set(xscale="log", ylim=(0, 100))
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_formatter(NullFormatter())
    figures.label(left, "work between two saves (ms)", "goodput (% of all time)")
    draw_causes(right, list(found.values()))
    right.set_xticks(range(len(found)), [f"{ms:.0f}" for ms in at_ms])
    right.grid(axis="x", visible=False)
    right.set_ylim(0, 100)
    figures.label(right, "work between two saves (ms)", "share of all time (%)")
    for ax in (left, right):
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}
        ax.legend(fontsize=9, frameon=False, ncols=2, **place)
    return figure


def draw_chance(ax: Axes, at_ms: Sequence[float], goodputs: Sequence[Sequence[float]]) -> None:
    """Shade the middle nine tenths of each interval's imagined runs, which are in order."""
    low = [100 * one[len(one) // 20] for one in goodputs]
    high = [100 * one[-1 - len(one) // 20] for one in goodputs]
    words = "nine of ten runs, by chance"
    ax.fill_between(at_ms, low, high, color=figures.BLUE, alpha=0.12, lw=0, label=words)


def draw_formula(ax: Axes, at_ms: Sequence[float], costs: Costs, mtbf_s: float) -> None:
    """Draw the expected goodput over the range of intervals, and Young and Daly's interval."""
    first_s = at_ms[0] / 1.5e3
    ratio = 2.25 * at_ms[-1] / at_ms[0]
    fine_s = [first_s * ratio ** (part / 100) for part in range(101)]
    curve = [100 * expected_goodput(s, costs.save_s, mtbf_s, costs.restart_s) for s in fine_s]
    ax.plot([1e3 * s for s in fine_s], curve, color=figures.BLUE, lw=1.6, label="formula")
    best_ms = 1e3 * young_daly(costs.save_s, mtbf_s)
    words = f"Young-Daly, {best_ms:.0f} ms"
    ax.axvline(best_ms, color=figures.BLACK, ls="--", lw=1.2, label=words)


def draw_measured(ax: Axes, at_ms: Sequence[float], groups: Sequence[Sequence[Run]]) -> None:
    """Draw each run as a dash where there are several, and the goodput of all time as a point."""
    if len(groups[0]) > 1:
        each = [
            (ms, 100 * run.spent.goodput)
            for ms, runs in zip(at_ms, groups, strict=True)
            for run in runs
        ]
        ax.plot(*zip(*each, strict=True), "_", color=figures.ORANGE, ms=8, label="one run")
    together = [100 * total_of(runs).goodput for runs in groups]
    words = "all runs together" if len(groups[0]) > 1 else "measured"
    ax.plot(at_ms, together, "o", color=figures.RED, ms=6, label=words)


def draw_causes(ax: Axes, groups: Sequence[Sequence[Run]]) -> None:
    """Draw a bar for each interval: the shares of its time by cause, which add up to 100 %."""
    totals = [total_of(runs) for runs in groups]
    bottom = [0.0] * len(totals)
    for cause, (words, color, hatch) in SPENT.items():
        heights = [100 * getattr(total, cause) / sum(total) for total in totals]
        look = {"color": color, "hatch": hatch, "label": words, "edgecolor": "white"}
        ax.bar(range(len(totals)), heights, 0.8, bottom, **look)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def total_of(runs: Sequence[Run]) -> Spent:
    """The seconds of all these runs by cause."""
    return Spent(*(sum(seconds) for seconds in zip(*(run.spent for run in runs), strict=True)))


# ---- fewer ranks, then more ----------------------------------------------------------------------


def elastic_losses(
    losses: Sequence[float],
    calm: Sequence[float],
    lives: Sequence[Mapping],
    events: Sequence[Mapping],
) -> Figure:
    """The loss of a run whose ranks came and went, beside a calm one's, and its lives below.

    Args:
        losses: of each step, as the finished run holds them; `calm` of the undisturbed run.
        lives: {"ranks", "start", "stop"} of each, in steps.
        events: {"event", "step"}.
    """
    figure, (top, bottom) = figures.new_figure(9.5, 5.2, rows=2)
    bottom.sharex(top)
    steps = range(1, len(losses) + 1)
    top.plot(steps, calm, color=figures.GREY, lw=4, alpha=0.5, label="one rank, undisturbed")
    top.plot(steps, losses, color=figures.BLUE, lw=1.2, label="ranks that come and go")
    for ax in (top, bottom):
        for event in events:
            ax.axvline(event["step"], color=figures.RED, ls="--", lw=1.2)
    for place, event in enumerate(events):
        height = 0.92 - 0.12 * place
        at = {"xycoords": ("data", "axes fraction"), "va": "center", "fontsize": 9}
        shift = {"xytext": (4, 0), "textcoords": "offset points"}
        top.annotate(event["event"], (event["step"], height), **at, **shift)
    figures.label(top, "", "loss (nats per token)")
    top.legend(loc="upper right", frameon=False, fontsize=9)
    for number, (life, after) in enumerate(zip(lives, [*lives[1:], None], strict=True)):
        kept = life["stop"] if after is None else min(life["stop"], after["start"])
        words = f"{life['ranks']} rank{'s' * (life['ranks'] > 1)}"
        bottom.barh(number, kept - life["start"], left=life["start"], color=figures.BLUE)
        bottom.barh(
            number,
            life["stop"] - kept,
            left=kept,
            color=figures.YELLOW,
            hatch="//",
            edgecolor=figures.BLACK,
            lw=0.5,
            label="steps lost and done again" if not number else None,
        )
        bottom.annotate(
            words,
            (life["stop"], number),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    bottom.set_yticks(range(len(lives)), [f"life {number}" for number in range(len(lives))])
    bottom.invert_yaxis()
    bottom.set_xlim(0, 1.1 * len(losses))
    bottom.legend(loc="upper right", frameon=False, fontsize=9)
    bottom.grid(axis="y", visible=False)
    figures.label(bottom, "step", "")
    return figure
