"""What lesson 03 draws of its measurements: throughput, sweeps, errors by epoch, the trade-off."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from manyhands.instruments import figures
from manyhands.instruments.figures import BLACK, BLUE, GREEN, GREY, ORANGE

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def throughput_curve(ax: Axes, speed: Mapping[int, float], shortest_s: float) -> None:
    """Draw the images per second of each batch size, and what they would be if a step took (s)."""
    batches = list(speed)
    ideal = [batch / shortest_s for batch in batches]
    measured = {"images per second": (batches, list(speed.values()))}
    predicted = {"ideal: each step as short as the shortest": (batches, ideal)}
    names = ("batch size (images)", "images per second")
    figures.measured_and_predicted(ax, measured, predicted, *names)
    powers_of_two(ax, batches)
    ax.yaxis.set_major_locator(LogLocator())
    ax.yaxis.set_major_formatter("{x:,.0f}")


def powers_of_two(ax: Axes, batches: Sequence[int]) -> None:
    """Mark every other batch size on a logarithmic axis, as a plain number."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches[:: 1 + len(batches) // 8])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def sweeps(runs: Mapping[str, Mapping]) -> Figure:
    """Draw the stored result of each sweep in a panel of its own: steps against batch size."""
    num_rows = -(-len(runs) // 2)
    figure, axes = figures.new_figure(9, 4.3 * num_rows, num_rows, 2)
    for ax, (name, run) in zip(axes.flat, runs.items(), strict=True):
        fit = (run["least_steps"], run["critical_batch"], run["noise_scale"])
        figures.steps_by_batch(ax, run["batches"], *fit)
        ax.set_title(f"{name}: target {run['target']:.0%}", fontsize=10, color=BLACK)
        ax.set_xlabel(f"batch size ({unit(run)})", fontsize=10, color=BLACK)
    return figure


def unit(run: Mapping) -> str:
    """What a sample of a stored sweep is."""
    return "sequences" if "sequences" in run["data"] else "images"


def errors_by_epoch(train: Curves, valid: Curves) -> Figure:
    """Draw the training error and the validation error of each batch size over the epochs."""
    figure, axes = figures.new_figure(9, 3.6, cols=2)
    for ax, curves, kind in zip(axes, (train, valid), ("training", "validation"), strict=True):
        figures.lines(ax, curves, "epoch", f"{kind} error (share of images)")
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(low, high)
    figures.legend_below(figure, axes[0])
    return figure


def trade_off(ax: Axes, results: Sequence[Mapping], least: float, critical: float) -> None:
    """Draw each batch size as a point: its steps to the target, and the samples that they take.

    Args:
        results: for each batch size its "batch" and its "mean" steps.
        least, critical: of the fit, which is the curve.
    """
    batches = [one["batch"] for one in results]
    steps = [one["mean"] for one in results]
    samples = [one["mean"] * one["batch"] for one in results]
    low = batches[0] / 2
    fine = [low * (4 * batches[-1] / batches[0]) ** (part / 100) for part in range(101)]
    curve = ([least * (1 + critical / b) for b in fine], [least * (b + critical) for b in fine])
    ax.axvline(least, color=ORANGE, ls=":", lw=1.5, label=f"least steps {least:.0f}")
    cheapest = least * critical
    ax.axhline(cheapest, color=GREEN, ls="-.", lw=1.5, label=f"least images {cheapest:,.0f}")
    ax.plot(*curve, color=BLUE, lw=1.4, label="fit")
    ax.plot(steps, samples, "o", color=BLUE, ms=5, label="measured, with the batch size")
    for batch, x, y in zip(batches, steps, samples, strict=True):
        ax.annotate(str(batch), (x, y), (5, 4), textcoords="offset points", size=9, color=BLACK)
    middle = f"critical batch {critical:.0f}"
    ax.plot(2 * least, 2 * cheapest, "D", mfc="none", mec=BLACK, ms=9, ls="none", label=middle)
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter(NullFormatter())
    names = ("steps to the target (what you wait for)", "images to the target (what you pay for)")
    figures.label(ax, *names, legend=True)
    ax.tick_params(colors=BLACK)
    ax.spines[["left", "bottom"]].set_color(GREY)
