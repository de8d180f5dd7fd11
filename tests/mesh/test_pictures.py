"""The figures of lesson 14 show what they are given; counted in their data, not as images."""

import pytest
from matplotlib.patches import FancyBboxPatch

from manyhands.instruments.ledger import Entry
from manyhands.mesh import figures
from manyhands.planner import figures as plan_figures
from manyhands.planner.hardware import GIB, GPUS
from manyhands.planner.memory import Training
from manyhands.planner.plans import plans
from manyhands.planner.shape import MODELS

SIZES = {"pp": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize(
    "sizes", [SIZES, {"pp": 4, "dp": 3, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 3}]
)
def test_a_mesh_has_a_box_for_every_rank(sizes):
    (ax,) = figures.mesh(sizes).axes
    boxes = [one for one in ax.patches if isinstance(one, FancyBboxPatch)]
    numbers = sorted(int(text.get_text()) for text in ax.texts if text.get_text().isdigit())
    assert numbers == list(range(len(boxes)))
    places = 1
    for size in sizes.values():
        places *= size
    assert len(boxes) == places


def entry(op, rank, nbytes, ranks, peer=None):
    return Entry(op, rank, peer, nbytes, ranks, None)


def test_bytes_of_pairs_are_sends_and_rings_along_an_axis():
    entries = [[] for _ in range(8)]
    entries[0] = [
        entry("send", 0, 100, (0, 4), 4),
        entry("send", 0, 50, (0, 4), 4),
        entry("recv", 0, 70, (0, 4), 4),
        entry("all_reduce", 0, 1000, (0, 1)),
        entry("all_gather", 0, 400, (0, 2)),
        entry("all_reduce", 0, 999, (0,)),
    ]
    entries[5] = [entry("reduce_scatter", 5, 600, (5, 7))]
    assert figures.pair_bytes(entries, SIZES) == {
        (0, 4): ("pp", 150),
        (0, 1): ("tp", 1000),
        (0, 2): ("dp", 200),
        (5, 7): ("dp", 300),
    }
    assert figures.axis_between(0, 7, SIZES) == "several"
    figure = figures.who_talks(figures.pair_bytes(entries, SIZES), 8)
    assert {text.get_text() for text in figure.axes[0].texts} == {"0.1", "1", "0.2", "0.3"}


def test_the_plane_holds_every_plan_and_the_limit_of_memory():
    found = plans(Training(MODELS["llama3-8b"], GPUS["H100-80GB"], 8, 64))
    (ax,) = plan_figures.plane(found, {"mine": (30.0, 5.0)}).axes
    drawn = sum(len(one.get_offsets()) for one in ax.collections)
    assert drawn == len(found)
    limits = [line.get_xdata()[0] for line in ax.lines if line.get_label().startswith("memory")]
    assert limits == [GPUS["H100-80GB"].memory_bytes / GIB]
    assert "mine" in [line.get_label() for line in ax.lines]
    many = {f"run {number}": (30.0, 5.0 + number) for number in range(6)}
    (ax,) = plan_figures.plane(found[:3], many).axes
    own = [line for line in ax.lines if line.get_label() in many]
    assert len({line.get_marker() for line in own}) == 6  # each is told from the others
    (ax,) = plan_figures.plane(found[:3], many | {"run 6": (30.0, 11.0)}).axes
    assert "run 6" in [line.get_label() for line in ax.lines]  # none is left out


def test_the_plane_leaves_out_a_limit_that_is_far_away():
    found = [plan for plan in plans(Training(MODELS["gpt2-124m"], GPUS["B200"], 8, 8)) if plan.fits]
    (ax,) = plan_figures.plane(found[:2]).axes
    needs = [plan.memory_bytes / GIB for plan in found[:2]]
    assert 10 * max(needs) < GPUS["B200"].memory_bytes / GIB
    assert "memory of the GPU" not in [line.get_label() for line in ax.lines]
    assert ax.get_xlim()[0] < min(needs) < max(needs) < ax.get_xlim()[1] < 3 * max(needs)
