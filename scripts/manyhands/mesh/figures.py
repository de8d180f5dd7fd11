"""Pictures of lesson 14: the mesh, who talks to whom on it, spreads of sums, and the crossing."""

from collections.abc import Mapping, Sequence
from math import prod

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import LogLocator

from manyhands.instruments import figures
from manyhands.instruments.ledger import Entry
from manyhands.mesh.bench import Crossing
from manyhands.mesh.grid import coordinates, ranks_along

AXIS = {  # colour and hatch of a mesh's axes, as of messages on them
    "pp": (figures.ORANGE, ".."),
    "dp": (figures.GREEN, "//"),
    "shard": (figures.GREEN, "//"),
    "replicate": (figures.PURPLE, "--"),
    "tp": (figures.BLUE, "xx"),
}
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of (n-1)/n of the whole


def look_of(axis: str) -> tuple[str, str]:
    """Colour and hatch of an axis."""
    return AXIS.get(axis, (figures.GREY, ""))


def mesh(sizes: Mapping[str, int]) -> Figure:
    """A grid of up to three axes: a block for each place on the first, ranks in rows and columns.

    Lines join the ranks of a group along the two inner axes; along the outermost axis the ranks at
    the same place of each block are a group.
    """
    axes = [""] * (3 - len(sizes)) + list(sizes)
    outer, rows, cols = (sizes.get(axis, 1) for axis in axes)
    width = min(11, 1.6 + outer * (cols * 0.85 + 0.6))
    figure, ax = figures.new_figure(width, 1.0 + 0.75 * rows)
    for rank in range(prod(sizes.values())):
        place = coordinates(rank, sizes)
        x = place.get(axes[0], 0) * (cols + 0.8) + place.get(axes[2], 0)
        y = place.get(axes[1], 0)
        box = {"boxstyle": "round,pad=0.02,rounding_size=0.1", "zorder": 3}
        ax.add_patch(
            FancyBboxPatch((x - 0.3, y - 0.27), 0.6, 0.54, fc="white", ec=figures.BLACK, **box)
        )
        ax.text(x, y, str(rank), ha="center", va="center", fontsize=11, zorder=4)
    for block in range(outer):
        left = block * (cols + 0.8)
        for row in range(rows):
            ax.plot([left, left + cols - 1], [row, row], color=look_of(axes[2])[0], lw=4, alpha=0.8)
        for col in range(cols):
            line = {"color": look_of(axes[1])[0], "lw": 4, "ls": (0, (2, 1)), "alpha": 0.8}
            ax.plot([left + col] * 2, [0, rows - 1], **line)
        if axes[0]:
            ax.text(left + (cols - 1) / 2, -0.62, f"{axes[0]} {block}", ha="center", fontsize=10)
    names = {axes[2]: "-", axes[1]: (0, (2, 1))}
    for axis, line in names.items():
        if axis:
            ax.plot([], [], color=look_of(axis)[0], ls=line, lw=4, label=f"a group along {axis}")
    ax.set_xlim(-0.7, outer * (cols + 0.8) - 0.8)
    ax.set_ylim(rows - 0.5, -0.95)
    ax.set_axis_off()
    ax.legend(fontsize=9, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0.02))
    return figure


def pair_bytes(
    entries_by_rank: Sequence[Sequence[Entry]], sizes: Mapping[str, int]
) -> dict[tuple[int, int], tuple[str, float]]:
    """(sender, receiver) -> the axis on which they talk, and the bytes sent in a step.

    A collective counts as a ring: each rank sends (n-1)/n of the whole to the next rank of the
    group, and twice that for an all-reduce.
    """
    found: dict[tuple[int, int], tuple[str, float]] = {}
    for rank, entries in enumerate(entries_by_rank):
        for entry in entries:
            if entry.op == "send":
                other, nbytes = entry.peer, float(entry.nbytes)
            elif (
                entry.op in ("all_reduce", "all_gather", "reduce_scatter") and len(entry.ranks) > 1
            ):
                n = len(entry.ranks)
                other = entry.ranks[(entry.ranks.index(rank) + 1) % n]
                nbytes = RING[entry.op] * entry.nbytes * (n - 1) / n
            else:
                continue
            axis, before = found.get((rank, other), (axis_between(rank, other, sizes), 0.0))
            found[rank, other] = axis, before + nbytes
    return found


def axis_between(rank: int, other: int, sizes: Mapping[str, int]) -> str:
    """The axis along which two ranks are in one group; "several" where there is none."""
    axes = [axis for axis in sizes if other in ranks_along(axis, rank, sizes)]
    return axes[0] if axes else "several"


def who_talks(pairs: Mapping[tuple[int, int], tuple[str, float]], num_ranks: int) -> Figure:
    """A square for each pair of ranks that talk: the colour is the axis, the number kilobytes."""
    figure, ax = figures.new_figure(1.6 + 0.62 * num_ranks, 1.4 + 0.5 * num_ranks)
    most = max(nbytes for _, nbytes in pairs.values())
    for (sender, receiver), (axis, nbytes) in pairs.items():
        color, hatch = look_of(axis)
        alpha = 0.25 + 0.55 * nbytes / most
        look = {"fc": color, "alpha": alpha, "hatch": hatch, "ec": "white", "lw": 0}
        ax.add_patch(Rectangle((receiver - 0.5, sender - 0.5), 1, 1, **look))
        back = {"fc": "white", "ec": "none", "alpha": 0.85, "pad": 1.5}
        text = f"{nbytes / 1e3:,.0f}" if nbytes >= 1e3 else f"{nbytes / 1e3:.1f}"
        ax.text(receiver, sender, text, ha="center", va="center", fontsize=8, bbox=back)
    ax.set_xlim(-0.5, num_ranks - 0.5)
    ax.set_ylim(num_ranks - 0.5, -0.5)
    figures.label(ax, "receives: rank", "sends: rank")
    ax.set_xticks(range(num_ranks))
    ax.set_yticks(range(num_ranks))
    ax.set_aspect("equal")
    axes = dict.fromkeys(axis for axis, _ in pairs.values())
    looks = [(axis, *look_of(axis)) for axis in axes]
    keys = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=f"along {axis} (kB a step)")
        for axis, color, hatch in looks
    ]
    figure.legend(handles=keys, fontsize=9, frameon=False, ncols=2, loc="outside lower center")
    return figure


def spreads(
    counts: Sequence[int],
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float]],
) -> Figure:
    """The spread of sums by their number of terms: points measured, lines predicted."""
    figure, ax = figures.new_figure(7, 3.8)
    series = [
        {name: (counts, values) for name, values in many.items()} for many in (measured, predicted)
    ]
    figures.measured_and_predicted(ax, *series, "terms of the sum", "spread / size of the sum")
    ax.yaxis.set_major_locator(LogLocator())  # seven decades: a label for each will do
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(count) for count in counts])
    return figure


def crossing(found: Crossing) -> Figure:
    """Steps with and without a slow network by tokens per rank, measured and predicted."""
    figure, ax = figures.new_figure(7, 3.8)
    names = "without a slow network", "with a slow network"
    pairs = zip(names, (found.quick_s, found.slow_s), strict=True)
    measured = {name: (found.tokens, [1e3 * one for one in many]) for name, many in pairs}
    predicted = {names[1]: (found.tokens, [1e3 * one for one in found.predicted_s])}
    figures.measured_and_predicted(ax, measured, predicted, "tokens per rank", "time (ms)")
    ax.axvline(found.predicted_tokens, color=figures.BLACK, ls="--", lw=1.2)
    words = f"hidden from {found.predicted_tokens:.0f} tokens on (dashed: predicted), "
    words += f"{found.measured_tokens:.0f} (measured)"
    ax.text(0.02, 0.04, words, transform=ax.transAxes, fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks(found.tokens, [str(tokens) for tokens in found.tokens])
    ax.set_yscale("linear")
    ax.set_ylim(0, 1.1e3 * max(*found.slow_s, *found.quick_s, *found.predicted_s))
    return figure
