"""The diagrams: committed as drawn, safe to show anywhere, legible, and true to the code."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import draw_diagrams
from draw_diagrams import HEIGHTS, ORDERS, PATTERNS, Config, main
from manyhands.collectives.ring import all_gather_ring, all_reduce_ring, reduce_scatter_ring
from manyhands.collectives.trees import broadcast_naive, broadcast_tree, gather, reduce_tree
from manyhands.data.corpus import ShardedSampler
from manyhands.data_parallel.loops import server_step, worker_step
from manyhands.first_job.places import Place, device_map
from manyhands.instruments.ledger import Ledger, rounds, traffic
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import rendezvous_arguments
from manyhands.saving.pieces import Box, overlap
from manyhands.saving.sharded import plan

pytestmark = pytest.mark.fast

FIGURES = Config().folder
NAMES = [draw.__name__ for draw in HEIGHTS]
ALLOWED = set("svg title desc defs pattern path marker rect g text polyline".split())
EM = 0.6  # of the font size: wide for a letter of Arial, about right for DejaVu Sans and monospace


class Area(NamedTuple):
    """A rectangle of the canvas, and the words in it."""

    left: float
    top: float
    right: float
    bottom: float
    words: str = ""

    @property
    def size(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)

    def overlaps(self, other: "Area") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def contains(self, other: "Area") -> bool:
        return self.holds(other.left, other.top) and self.holds(other.right, other.bottom)

    def holds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom


def read(name: str) -> ElementTree.Element:
    """The committed picture, without the namespace in its tags."""
    root = ElementTree.parse(FIGURES / f"{name}.svg").getroot()
    for element in root.iter():
        element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def texts(root: ElementTree.Element) -> list[Area]:
    """Where each line of words stands, by a crude and generous estimate of its width."""
    group = root.find("g")
    areas = []
    for text in group.iter("text"):
        size = float(text.get("font-size", group.get("font-size")))
        x, y, width = float(text.get("x")), float(text.get("y")), EM * size * len(text.text)
        share = {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "middle")]
        left = x - share * width
        areas.append(Area(left, y - 0.75 * size, left + width, y + 0.25 * size, text.text))
    return areas


def boxes(root: ElementTree.Element) -> list[Area]:
    areas = []
    for rect in root.find("g").iter("rect"):
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        areas.append(Area(x, y, x + w, y + h))
    return areas


def arrows(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The corners of every line with a tip at its end."""
    found = [line for line in root.find("g").iter("polyline") if line.get("marker-end")]
    return [[tuple(map(float, one.split(","))) for one in f.get("points").split()] for f in found]


def test_committed_files_are_what_the_script_draws(tmp_path: Path) -> None:
    main(Config(folder=tmp_path))
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in FIGURES.glob("*.svg")}
    assert sorted(drawn) == sorted(f"{name}.svg" for name in NAMES)


def test_check_names_the_stale_file_and_leaves_it_alone(tmp_path: Path) -> None:
    main(Config(folder=tmp_path))
    stale = tmp_path / "lesson.svg"
    fresh = stale.read_bytes()
    stale.write_bytes(fresh.replace(b"done", b"gone"))
    command = [sys.executable, draw_diagrams.__file__, "--check", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[0] == "out of date: lesson.svg"
    assert b"gone" in stale.read_bytes()
    main(Config(folder=tmp_path))
    assert stale.read_bytes() == fresh
    main(Config(check=True, folder=tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_safe_and_has_words_for_those_who_cannot_see_it(name: str) -> None:
    root = read(name)
    assert {element.tag for element in root.iter()} <= ALLOWED
    assert [root[0].tag, root[1].tag] == ["title", "desc"]
    assert len(root[0].text) > 5 and len(root[1].text) > 80
    ids = {f"#{element.get('id')}" for element in root.iter()}
    for element in root.iter():
        for key, value in element.attrib.items():
            assert "href" not in key and not key.startswith("on") and "://" not in value
            assert set(re.findall(r"url\((.*?)\)", value)) <= ids


@pytest.mark.parametrize("name", NAMES)
def test_card_is_opaque_and_covers_the_canvas(name: str) -> None:
    root = read(name)
    card = root.find("rect")
    assert (card.get("width"), card.get("height")) == (root.get("width"), root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert min(int(card.get("fill")[place : place + 2], 16) for place in (1, 3, 5)) > 240
    assert card.get("fill-opacity") is None
    assert list(root).index(card) < list(root).index(root.find("g"))


@pytest.mark.parametrize("name", NAMES)
def test_words_are_legible(name: str) -> None:
    root = read(name)
    sizes = [element.get("font-size") for element in root.iter() if element.get("font-size")]
    assert min(map(float, sizes)) >= 14
    width, height = float(root.get("width")), float(root.get("height"))
    words = texts(root)
    for number, area in enumerate(words):
        assert area.left >= 4 and area.top >= 4, area
        assert area.right <= width - 4 and area.bottom <= height - 4, area
        for other in words[number + 1 :]:
            assert not area.overlaps(other), (area, other)


@pytest.mark.parametrize("name", NAMES)
def test_words_fit_into_the_smallest_box_around_them(name: str) -> None:
    root = read(name)
    num_checked = 0
    for area in texts(root):
        middle = (area.left + area.right) / 2, (area.top + area.bottom) / 2
        if around := [box for box in boxes(root) if box.holds(*middle)]:
            box = min(around, key=lambda box: box.size)
            assert box.left <= area.left and area.right <= box.right, (area, box)
            assert box.top <= area.top and area.bottom <= box.bottom, (area, box)
            num_checked += 1
    assert num_checked >= 5


def test_sampler_picture_deals_as_the_sampler_does() -> None:
    for epoch, order in enumerate(ORDERS):
        for rank in range(3):
            sampler = ShardedSampler(len(order), rank, world_size=3, seed=0)
            sampler.set_epoch(epoch)
            assert list(order[rank::3]) == list(sampler)


def test_rendezvous_picture_shows_the_arguments_that_jobs_use() -> None:
    shown = [area.words for area in texts(read("ddp_rendezvous")) if area.words[:2] == "--"]
    assert shown == rendezvous_arguments(2, 4, "gpu07", 4711, is_head=True)
    port = shown[4].rpartition(":")[2]
    assert f"port {port}" in [area.words for area in texts(read("ddp_ranks"))]


def places_on_two_nodes() -> list[Place]:
    rank = dist.get_rank()
    environ = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank % 2}", "LOCAL_WORLD_SIZE": "2"}
    return device_map(environ, 2, f"node{rank // 2 + 1}")


def test_map_picture_places_the_ranks_as_the_lesson_does() -> None:
    root = read("first_job_map")
    words, shown = texts(root), []
    areas = dict.fromkeys(boxes(root))  # each is drawn twice: paper, then colour
    for gpu in (box for box in areas if box.right - box.left == 120):
        (node,) = [box for box in areas if box.contains(gpu) and box != gpu]
        (host,) = [text.words for text in words if node.contains(text) and "node" in text.words]
        inside = [text.words.rpartition(" ")[2] for text in words if gpu.contains(text)]
        device, rank, local_rank = inside
        shown.append(Place(int(rank), host, int(local_rank), device))
    places = run_ranks(places_on_two_nodes, 4)[0]
    assert shown == places
    rank, host, local_rank, device = places[-1]
    sentence = f"rank {rank} is local rank {local_rank} on {host}, device {device}"
    assert sentence in [text.words for text in words]


def test_cluster_picture_sends_data_and_job_the_ways_they_can_go() -> None:
    root = read("first_job_cluster")

    def near(x: float, y: float) -> tuple[str, ...]:
        """The words in the smallest box that an arrow touches at (x, y)."""
        tip = Area(x - 3, y - 3, x + 3, y + 3)
        touched = [box for box in boxes(root) if box.overlaps(tip)]
        box = min(touched, key=lambda box: box.size)
        return tuple(text.words for text in texts(root) if box.contains(text))

    ways = {near(*line[0]): near(*line[-1]) for line in arrows(root)}
    fetch, (command, file) = ("prepare_data.py",), ("sbatch", "sbatch/first_job.sbatch")
    assert ways["internet",] == fetch and ways[fetch] == ("data",)
    assert ways[command, file] == ("yours", "3rd")
    assert "compute nodes" in ways["other", "1st"]
    repo = Path(draw_diagrams.__file__).parents[1]
    assert (repo / "scripts" / fetch[0]).is_file() and (repo / file).is_file()


def test_evaluation_picture_adds_up() -> None:
    root = read("ddp_evaluation")
    numbers = [int(area.words) for area in texts(root) if area.words.isdigit()]
    (sum_0, count_0, mean_0), (sum_1, count_1, mean_1) = numbers[:3], numbers[3:]
    assert (sum_0, sum_1) == (mean_0 * count_0, mean_1 * count_1)
    items = {box for box in boxes(root) if box.right - box.left == 12}
    assert len(items) == count_0 + count_1
    right, wrong = [area.words for area in texts(root) if "=" in area.words]
    pooled = (sum_0 + sum_1) / (count_0 + count_1)
    assert right == f"({sum_0} + {sum_1}) / ({count_0} + {count_1}) = {pooled:.2f}"
    assert wrong == f"({mean_0} + {mean_1}) / 2 = {(mean_0 + mean_1) / 2:.2f}"


def values_of(words: str) -> float:
    """What a chunk of the overview holds where rank r's numbers are 10 to the power of r."""
    return {"": 0.0, "sum": 1111.0}.get(words) or (10.0 ** int(words) if words else 0.0)


def run_patterns() -> dict[str, list[float]]:
    """This rank's four chunks after each of the collectives."""
    rank, ends = dist.get_rank(), {}
    for name, (_, before, _) in PATTERNS.items():
        tensor = torch.tensor([values_of(before(rank, chunk)) for chunk in range(4)])
        chunks = tensor.split(1)
        {
            "broadcast": lambda tensor=tensor: broadcast_tree(tensor),
            "gather": lambda chunks=chunks: gather(chunks),
            "reduce": lambda tensor=tensor: reduce_tree(tensor),
            "all-gather": lambda chunks=chunks: all_gather_ring(chunks),
            "all-reduce": lambda tensor=tensor: all_reduce_ring(tensor),
            "reduce-scatter": lambda chunks=chunks: reduce_scatter_ring(chunks),
        }[name]()
        ends[name] = tensor.tolist()
    return ends


def test_overview_shows_what_the_collectives_do() -> None:
    for rank, ends in enumerate(run_ranks(run_patterns, 4)):
        for name, (_, _, after) in PATTERNS.items():
            for chunk, value in enumerate(ends[name]):
                if shown := after(rank, chunk):  # what is left over elsewhere is of no use
                    assert value == values_of(shown), (name, rank, chunk)
    drawn = [area.words for area in texts(read("collectives_overview"))]
    cells = [(r, c) for r in range(4) for c in range(4)]
    for words in ("sum", "2"):
        shown = [f(r, c) for _, *both in PATTERNS.values() for f in both for r, c in cells]
        num_headers = 2 * len(PATTERNS) if words == "2" else 0
        assert drawn.count(words) == shown.count(words) + num_headers
    assert set(PATTERNS) <= set(drawn)


def messages_of(fn) -> list:
    with Ledger() as ledger:
        fn(torch.zeros(1))
    return ledger.entries


@pytest.mark.parametrize(("fn", "left"), [(broadcast_naive, 84), (broadcast_tree, 456)])
def test_tree_picture_shows_the_messages_of_the_two_broadcasts(fn, left: int) -> None:
    sent = {
        (number, entry.rank, entry.peer)
        for number, sends in enumerate(rounds(run_ranks(messages_of, 8, fn)), 1)
        for entry in sends
    }
    drawn = {
        (round((bottom - 26) / 42), round((start - left) / 38), round((stop - left) / 38))
        for (start, _), (stop, bottom) in arrows(read("collectives_tree"))
        if left <= start < left + 8 * 38
    }
    assert drawn == sent


def test_ring_picture_sends_each_chunk_to_its_place_at_the_next_rank() -> None:
    root = read("collectives_ring")
    ranks = [box for box in boxes(root) if box.right - box.left == 308][::2]
    words = {area.words: area for area in texts(root)}
    drawn = arrows(root)
    assert len(ranks) == len(drawn) == 4
    for rank, ((start, _), *_, (stop, height)) in enumerate(drawn):
        chunk, own, following = words[f"chunk {rank}"], ranks[rank], ranks[(rank + 1) % 4]
        assert own.holds(words[f"rank {rank}"].left, words[f"rank {rank}"].top)
        assert own.holds(chunk.left, chunk.top) and chunk.left < start < chunk.right
        assert following.top - 9 < height < following.bottom + 9
        assert stop - following.left == start - own.left


def step_with_server() -> list:
    model = nn.Linear(9, 1)  # 10 parameters
    with Ledger() as ledger:
        if dist.get_rank() == 0:
            server_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            model(torch.ones(1, 9)).sum().backward()
            worker_step(model)
    return ledger.entries


def average_in_ring() -> list:
    with Ledger() as ledger:
        all_reduce_ring(torch.zeros(16))
    return ledger.entries


def test_server_picture_counts_bytes_as_the_ledger_does() -> None:
    server, ring = [area.words for area in texts(read("data_parallel_server")) if "=" in area.words]
    entries = [entry for mine in run_ranks(step_with_server, 5) for entry in mine]
    num_bytes = sum(traffic(entries).values())  # all of them pass the server
    assert f"n = 4: {num_bytes // 10}P bytes" in server
    for n in (4, 8):
        entries = [entry for mine in run_ranks(average_in_ring, n) for entry in mine]
        (num_bytes,) = set(traffic(entries).values())  # the same on every link
        assert f"n = {n}: {2 * num_bytes // 16}P bytes" in ring  # in over one link, out over one


def test_reshard_picture_has_an_arrow_for_each_common_box() -> None:
    root, found = read("checkpoint_reshard"), []
    for owned in (Box((4 * rank,), (4,)) for rank in range(3)):
        for stored in (Box((3 * rank,), (3,)) for rank in range(4)):
            if common := overlap(owned, stored):
                found.append((common.offset[0], common.size[0]))
    counts = [int(area.words) for area in texts(root) if area.words.isdigit()]
    middles = [start + count / 2 for start, count in found]
    assert counts == [count for _, count in found]
    assert [(line[0][0] - 120) / 50 for line in arrows(root)] == middles


def test_sharded_picture_has_the_writer_of_the_plan() -> None:
    boxes_of = [{"b": Box((0,), (4,)), "w": Box((3 * rank, 0), (3, 4))} for rank in range(4)]
    writers = plan(boxes_of)
    shown = [area.words for area in texts(read("checkpoint_sharded")) if area.words[0] == "b"]
    assert shown.index("b: written") == writers["b", Box((0,), (4,))]
