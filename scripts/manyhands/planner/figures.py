"""Plans in a picture: the memory that they need and the time that they take."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from manyhands.instruments import figures
from manyhands.planner.hardware import GIB
from manyhands.planner.plans import Plan

OVERLAY = "*XDPvh"  # markers of what is laid over the plans, in turn
NEAR = 10  # times the largest need: a GPU with more memory is not in the picture
RECOMPUTE = {"none": "o", "selective": "s", "full": "^"}


def plane(
    plans: Sequence[Plan], overlay: Mapping[str, tuple[float, float]] | None = None
) -> Figure:
    """Plans in the plane of memory and time: colour by tensor ranks, shape by recomputation.

    Args:
        overlay: measurements or published runs: name -> (GiB, seconds).
    """
    figure, ax = figures.new_figure(8.2, 4.4)
    degrees = sorted({plan.layout.tp for plan in plans})
    for number, tp in enumerate(degrees):
        for way, marker in RECOMPUTE.items():
            some = [p for p in plans if p.layout.tp == tp and p.layout.recompute == way]
            if some:
                x = [plan.memory_bytes / GIB for plan in some]
                look = {"color": figures.RANK[number % 7], "marker": marker, "s": 16, "alpha": 0.6}
                ax.scatter(x, [plan.step_s for plan in some], lw=0, **look)
        ax.scatter([], [], color=figures.RANK[number % 7], marker="o", s=26, label=f"tp {tp}")
    for way, marker in RECOMPUTE.items():
        if any(plan.layout.recompute == way for plan in plans):
            ax.scatter([], [], color=figures.GREY, marker=marker, s=26, label=f"recompute {way}")
    ax.set(xscale="log", yscale="log")
    limit(ax, plans, [gib for gib, _ in (overlay or {}).values()])
    for (name, point), marker in zip((overlay or {}).items(), cycle(OVERLAY), strict=False):
        look = {"ls": "none", "color": figures.BLACK, "mec": "white", "mew": 0.6, "ms": 13}
        ax.plot(*point, marker=marker, label=name, **look)
    figures.label(ax, "memory of a GPU (GiB)", "time of a step (s)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    figure.legend(fontsize=8.5, frameon=False, loc="outside right upper")
    return figure


def limit(ax: Axes, plans: Sequence[Plan], others: Sequence[float]) -> None:
    """Shade what does not fit on the GPU, where this is near to what the plans or `others` need."""
    gib = plans[0].training.gpu.memory_bytes / GIB
    needs = [*(plan.memory_bytes / GIB for plan in plans), *others]
    if gib > NEAR * max(needs):
        ax.set_xlim(0.8 * min(needs), 2 * max(needs))
        return
    ax.set_xlim(0.8 * min(*needs, gib), 1.2 * max(*needs, gib))
    ax.axvspan(gib, ax.get_xlim()[1], color=figures.ORANGE, alpha=0.12, lw=0)
    ax.axvline(gib, color=figures.BLACK, lw=1, label="memory of the GPU")
