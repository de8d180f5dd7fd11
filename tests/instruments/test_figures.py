"""Figures, by what they hold: curves, colours, cells, arrows; never as images."""

from functools import partial

import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import FancyArrowPatch, Rectangle

from manyhands.instruments import figures
from manyhands.instruments.replay import Message, Round

pytestmark = pytest.mark.fast

ALL = frozenset({0, 1, 2})
START = Round([], {rank: {chunk: frozenset({rank}) for chunk in range(3)} for rank in range(3)})
HELD = START.held | {1: START.held[1] | {0: frozenset({0, 1})}, 0: START.held[0] | {2: ALL}}
STATE = Round([Message(0, 1, 0, frozenset({0})), Message(2, 0, 2, frozenset({1, 2}))], HELD)


def test_algorithms_look_alike_everywhere_and_unlike_each_other():
    looks = figures.ALGORITHM.values()
    for column in zip(*looks, strict=True):
        assert len(set(column)) == len(looks)
    assert figures.style("all_reduce_ring", 3) == figures.style("ring") == figures.style("my ring")
    assert figures.style("string", 1)["color"] == figures.RANK[1]  # not the word "ring"
    _, ax = figures.new_figure()
    figures.lines(ax, {"tree": ([1, 2], [3, 4]), "other": (range(13), range(13))}, "x", "y")
    tree, other = ax.lines
    assert (tree.get_color(), tree.get_marker(), tree.get_linestyle()) == (figures.GREEN, "^", "-.")
    assert (other.get_color(), other.get_marker()) == (figures.RANK[1], "None")


def test_measured_points_and_predicted_lines_share_a_colour():
    figure, ax = figures.new_figure()
    measured = {"ring": ([1, 10], [2.0, 3.0]), "tree": ([1, 10], [1.0, 5.0])}
    predicted = {"ring": ([1, 10, 100], [2.0, 3.1, 12.0]), "native": ([1], [1.0])}
    figures.measured_and_predicted(ax, measured, predicted, "bytes", "time (s)")
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    line, points, key = ax.lines[:3]
    assert list(line.get_ydata()) == [2.0, 3.1, 12.0] and line.get_marker() == "None"
    assert list(points.get_ydata()) == [2.0, 3.0] and points.get_linestyle() == "None"
    assert {one.get_color() for one in (line, points, key)} == {figures.ALGORITHM["ring"][0]}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ring", "tree", "native"]
    keys = ax.get_legend().legend_handles  # both, only points, only a line
    assert [key.get_marker() != "None" for key in keys] == [True, True, False]
    assert [key.get_linestyle() != "None" for key in keys] == [True, False, True]
    figures.legend_below(figure, ax)
    assert ax.get_legend() is None
    assert figure.legends[0].get_title().get_text() == "points: measured; lines: predicted"


def test_a_round_shows_who_holds_what_and_what_has_just_come():
    _, ax = figures.new_figure()
    figures.draw_round(ax, STATE)
    words = {(text.get_position()): text.get_text() for text in ax.texts}
    assert words[1, 0] == "0+1" and words[0, 2] == "all" and words[2, 1] == "2"
    assert len(words) == 9
    cells = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    red = [cell for cell in cells if cell.get_edgecolor() == to_rgba(figures.RED)]
    assert sorted((cell.get_center() for cell in red), key=tuple) == [
        pytest.approx((0, 2)),
        pytest.approx((1, 0)),
    ]
    shade = {tuple(cell.get_center().round(2)): to_hex(cell.get_facecolor()) for cell in cells}
    assert shade[0, 2] == figures.BLUE and shade[1, 0] != shade[2, 1] != figures.BLUE
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    ends = [[round(x) for x, _ in arrow._posA_posB] for arrow in arrows]
    assert ends == [[0, 1], [2, 0]]


def test_overview_has_a_picture_for_every_round():
    figure = figures.rounds_overview([START, STATE, START, STATE])
    titles = [ax.get_title() for ax in figure.axes if ax.get_visible()]
    assert titles == ["start", "round 1", "round 2", "round 3"]
    num_cells = [len(ax.texts) for ax in figure.axes if ax.get_visible()]
    assert num_cells == [9] * 4
    assert figures.rounds_overview([START]).axes[0].get_title() == "start"  # one rank, no rounds


def test_slider_redraws_the_round_it_stands_at():
    pytest.importorskip("ipywidgets", reason="ipywidgets comes with the course's environment")
    slider, picture = figures.sliders(
        partial(figures._round_picture, [START, STATE]), round=range(2)
    ).children
    first = bytes(picture.value)
    assert list(slider.options) == [0, 1] and first.startswith(b"\x89PNG")
    slider.value = 1
    assert bytes(picture.value) != first
    slider.value = 0
    assert bytes(picture.value) == first


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_shows_the_static_figure_first_and_the_slider_where_it_can(
    tmp_path, has_widgets
):
    nbformat = pytest.importorskip("nbformat", reason="nbformat comes with jupyterlab")
    from nbclient import NotebookClient

    source = f"""\
import sys
from manyhands.instruments import figures
from manyhands.instruments.replay import Round
if not {has_widgets}:
    sys.modules["ipywidgets"] = None
figures.show_rounds([Round([], {{0: {{0: frozenset([0])}}}})], "one rank")"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": tmp_path}}).execute()
    static, *slider = notebook.cells[0].outputs
    assert static.metadata["image/png"]["alt"] == "one rank"
    assert len(slider) == has_widgets
    for output in slider:
        assert "application/vnd.jupyter.widget-view+json" in output.data
        assert output.data["text/plain"].startswith("a slider through the rounds")


def test_show_rounds_prints_words_outside_a_notebook(capsys):
    figures.show_rounds([START, STATE], "two rounds")
    assert capsys.readouterr().out == "figure: two rounds\n"


BOWL = [[0.1 + x * x + y * y for y in (-1, 0, 1)] for x in (-2, 0, 2)]  # steep in x, flat in y


def test_contours_have_x_to_the_right_and_dark_is_low():
    _, ax = figures.new_figure()
    filled = figures.contours(ax, [-2, 0, 2], [-1, 0, 1], BOWL, [0.1, 1, 10])
    assert filled.axes.get_xlim() == (-2, 2) and filled.axes.get_ylim() == (-1, 1)
    low, high = (sum(filled.cmap(filled.norm(value))[:3]) for value in (0.1, 10))
    assert low < high
    _, ax = figures.new_figure()
    pale = figures.contours(ax, [-2, 0, 2], [-1, 0, 1], BOWL, [0.1, 1, 10], pale=True)
    assert min(pale.cmap(0.0)[:3]) > 0.5  # a path can be seen on it


def test_surfaces_share_one_scale_of_colours_and_have_a_relief_in_their_own():
    small = [[loss / 10 for loss in row] for row in BOWL]
    figure = figures.loss_surfaces({"with": BOWL, "without": small}, [-1, 0, 1])
    flat = [ax for ax in figure.axes if ax.get_title() and ax.name != "3d"]
    assert [ax.get_title() for ax in flat] == ["with", "without"]
    scales = {(ax.collections[0].norm.vmin, ax.collections[0].norm.vmax) for ax in flat}
    assert len(scales) == 1 and scales.pop() == pytest.approx((0.01, 5.1))
    reliefs = [ax for ax in figure.axes if ax.name == "3d"]
    tops = [ax.get_zlim()[1] for ax in reliefs]
    assert tops[0] == pytest.approx(10 * tops[1])


def test_a_level_surface_is_drawn_and_a_shallow_one_has_contours_of_its_own():
    shallow = [[1 + loss / 100 for loss in row] for row in BOWL]
    level = [[1.0] * 3 for _ in range(3)]
    figure = figures.loss_surfaces({"deep": BOWL, "shallow": shallow, "level": level}, [-1, 0, 1])
    flat = {ax.get_title(): ax for ax in figure.axes if ax.get_title() and ax.name != "3d"}
    assert sum(map(len, flat["shallow"].collections[-1].allsegs)) > 5


def test_steps_by_batch_shows_the_regimes_the_range_and_the_fit():
    results = [{"batch": b, "mean": 100 / b, "steps": [90 / b, 110 / b]} for b in (1, 4, 64)]
    _, ax = figures.new_figure()
    figures.steps_by_batch(ax, results, 10.0, 8.0, noise_scale=12.0)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"perfect scaling", "plateau", "critical batch 8", "noise scale 12"} <= set(names)
    curve = max(ax.lines, key=lambda line: len(line.get_xdata()))
    assert curve.get_ydata()[0] == pytest.approx(10 * (1 + 8 / 1))
    assert curve.get_ydata()[-1] == pytest.approx(10 * (1 + 8 / 64))
    (bars,) = [c for c in ax.collections if hasattr(c, "get_segments")]
    assert bars.get_segments()[0][:, 1] == pytest.approx([90, 110])
    green, orange = (
        patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches
    )
    assert (green.x0, green.x1) == pytest.approx((1, 2))
    assert (orange.x0, orange.x1) == pytest.approx((32, 64))


def test_sliders_hand_over_all_choices_and_draw_each_picture_once():
    pytest.importorskip("ipywidgets", reason="ipywidgets comes with the course's environment")
    drawn = []

    def draw(rate, batch):
        drawn.append((rate, batch))
        return figures.new_figure(2, 2)[0]

    *rows, picture = figures.sliders(draw, rate=[0.1, 0.2], batch=[1, 8]).children
    assert drawn == [(0.1, 1)] and bytes(picture.value).startswith(b"\x89PNG")
    rows[0].value = 0.2
    rows[1].value = 8
    rows[1].value = 1
    assert drawn == [(0.1, 1), (0.2, 1), (0.2, 8)]


def test_stacked_bars_stand_on_each_other_and_say_their_sum():
    _, ax = figures.new_figure()
    parts = {"weights": 1.0, "gradients": 2.0}
    figures.stacked_bars(ax, [("a", parts), ("b", parts), ("c", {"weights": 4.0})], "MB", 2)
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    assert tops == [1, 1, 4, 3, 3, 4]
    assert [text.get_text() for text in ax.texts] == ["3", "3", "4"]
    left = [bar.get_x() for bar in ax.patches[:3]]
    assert left[2] - left[1] > left[1] - left[0]  # the gap
