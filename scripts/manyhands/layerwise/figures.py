"""The figure of lesson 08's comparison: each optimizer's accuracies, by batch."""

from collections.abc import Mapping
from statistics import fmean

from matplotlib.figure import Figure

from manyhands.instruments.figures import BLUE, label, new_figure
from manyhands.layerwise.comparison import Outcome


def accuracies_drawn(outcomes: Mapping[int, Mapping[str, Outcome]]) -> Figure:
    """A panel for each batch: an optimizer's accuracy with each seed, and a mark at the mean."""
    figure, axes = new_figure(8, 2.8, cols=len(outcomes))
    for ax, (batch, found) in zip(axes, outcomes.items(), strict=True):
        for row, one in enumerate(found.values()):
            values = [100 * value for value in one.accuracies]
            ax.plot(values, [row] * len(values), "o", color=BLUE, alpha=0.4, markersize=5)
            ax.plot(fmean(values), row, "|", color=BLUE, markersize=16, markeredgewidth=2)
        ax.set_yticks(range(len(found)), list(found))
        ax.invert_yaxis()
        ax.set_title(f"batch {batch:,}", fontsize=10)
        label(ax, "accuracy on the test images (%)", "")
    return figure
