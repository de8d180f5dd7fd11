"""What lesson 09 draws of the bytes that autograd keeps."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from manyhands.instruments.figures import measured_and_predicted, new_figure

TICKS = (4_000, 6_000, 8_000, 12_000, 16_000)  # bytes per token


def kept_against_length(
    lengths: Sequence[int],
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float]],
) -> Figure:
    """Draw the bytes kept per token against the sequence length, by the kind of attention."""
    figure, ax = new_figure(7, 3.6)
    points = {name: (lengths, values) for name, values in measured.items()}
    curves = {name: (lengths, values) for name, values in predicted.items()}
    names = ("sequence length T (tokens)", "bytes kept per token")
    measured_and_predicted(ax, points, curves, *names)
    ax.set_xticks(lengths, lengths)
    ax.xaxis.set_minor_locator(NullLocator())
    most = max(value for values in measured.values() for value in values)
    ax.set_ylim(3_000, 1.2 * most)
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS if tick < 1.2 * most]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:,g}")
    return figure
