"""Draws where cutting a block pays."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from manyhands.instruments import figures
from manyhands.tensor.cost import Link, messages_s, products_s

WIDTHS = (1024, 4096, 16384)
TOKENS = 8192


def messages_against_products(ranks_of: Mapping[Link, Sequence[int]], flops_per_s: float) -> Figure:
    """For each link, message time over product time by the number of ranks, a line per width.

    Args:
        ranks_of: the numbers of ranks that are joined by a link.
        flops_per_s: of one rank.
    """
    figure, axes = figures.new_figure(3.4 * len(ranks_of), 3.8, cols=len(ranks_of))
    for ax, (link, ranks) in zip(figure.axes, ranks_of.items(), strict=True):
        series = {}
        for width in WIDTHS:
            shares = [
                messages_s(width, TOKENS, n, link) / products_s(width, TOKENS, n, flops_per_s)
                for n in ranks
            ]
            series[f"width {width:,}"] = (ranks, shares)
        ax.axhspan(1, 1e4, color=figures.ORANGE, alpha=0.12, lw=0)
        ax.axhline(1, color=figures.BLACK, lw=1, label="messages as long as products")
        figures.lines(ax, series, "ranks", "message time / product time")
        ax.set_title(f"{link.name},\n{link.bytes_per_s / 1e9:.0f} GB/s", fontsize=11)
        ax.set(xscale="log", yscale="log", ylim=(0.01, 1000))
        ax.set_xscale("log", base=2)
        ax.set_xticks(ranks, [str(n) for n in ranks])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_locator(LogLocator())
        ax.yaxis.set_major_formatter("{x:g}")
        ax.label_outer()
    figures.legend_below(figure, figure.axes[0])
    return figure


def speed_up(widths: Sequence[int], gains: Sequence[Sequence[float]], num_ranks: int) -> Figure:
    """How many times as fast a cut block is as a whole one: median and middle half of the rounds.

    Args:
        gains: for each width the gain of each round.
    """
    figure, ax = figures.new_figure(6.5, 3.2)
    quarters = [statistics.quantiles(rounds, n=4) for rounds in gains]
    medians = [middle for _, middle, _ in quarters]
    below = [middle - low for low, middle, _ in quarters]
    above = [high - middle for _, middle, high in quarters]
    look = {"color": figures.BLUE, "capsize": 3, "lw": 1.4, "ms": 5}
    ax.errorbar(widths, medians, [below, above], fmt="o-", label="measured, middle half", **look)
    ax.axhline(1, color=figures.BLACK, lw=1, label="no gain")
    ax.axhline(num_ranks, color=figures.GREY, ls="--", lw=1, label="no message takes any time")
    figures.label(ax, "width D", f"time of 1 rank / time of {num_ranks} ranks", legend=True)
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, [str(width) for width in widths])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(0, max(1.15 * num_ranks, 1.05 * max(high for *_, high in quarters)))
    return figure
