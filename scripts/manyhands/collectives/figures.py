"""What lesson 04 draws of its races: the time of an all-reduce against the number of ranks."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from manyhands.instruments.figures import label, new_figure, style


def against_ranks(
    world_sizes: Sequence[int],
    measured_s: Mapping[str, Sequence[float]],
    model_s: Mapping[str, Sequence[float]] | None = None,
    looks: Mapping[str, str] | None = None,
) -> Figure:
    """Draw times (s) against the number of ranks: measured as points, by the model as lines.

    Args:
        model_s: without it the points are joined.
        looks: name -> an algorithm's name, whose colour, line and marker are used; so a curve can
            go under a name that does not give the algorithm away.
    """
    figure, ax = new_figure(width=6, height=3.8)
    for number, (name, seconds) in enumerate(measured_s.items()):
        look = style((looks or {}).get(name, name), number)
        points = look | ({"linestyle": "none"} if model_s else {})
        ax.plot(world_sizes, [1e3 * s for s in seconds], **points, markersize=6, linewidth=1.6)
        if model_s:
            line = look | {"marker": None}
            ax.plot(world_sizes, [1e3 * s for s in model_s[name]], **line, linewidth=1.4)
        ax.plot([], [], **look, markersize=6, linewidth=1.6, label=name)
    ax.set_ylim(bottom=0)
    label(ax, "ranks", "time (ms)", legend=True)
    if model_s:
        ax.get_legend().set_title("points: measured; lines: predicted", {"size": 9})
    return figure
