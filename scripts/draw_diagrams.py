"""Draw the diagrams in notebooks/figures/, as SVG files.

    python scripts/draw_diagrams.py            write what is out of date
    python scripts/draw_diagrams.py --check    write nothing; exit 1 if something is out of date

A diagram is a function that puts boxes, lines and words on a card. Its docstring is the picture's
title and its description, for people who cannot see it. The card is opaque, so it can also be read
in a dark notebook. Colours and hatches mean what they mean in `manyhands.figures`. Lengths are in
SVG units, from the card's top left corner.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from manyhands.figures import BLACK, GREEN, GREY, HATCH, LIGHT_GREY, ORANGE, RANK, RED, ROLE
from manyhands.runtime import command_line

PAPER = "#fcfcfa"
BOLD, MONO = ' font-weight="bold"', ' font-family="Menlo, Consolas, monospace"'
START, END = ' text-anchor="start"', ' text-anchor="end"'
DASHED, TIP = ' stroke-dasharray="6 4"', ' marker-end="url(#tip)"'
BOTH_TIPS = TIP + ' marker-start="url(#tip)"'
STROKES = {"//": "M-2 2L2 -2M0 8L8 0M6 10L10 6", "\\\\": "M-2 6L2 10M0 0L8 8M6 -2L10 2"}
STROKES |= {"xx": "M0 8L8 0M0 0L8 8", "..": "M3 4h2", "--": "M0 4h8"}  # in a tile of 8 x 8
HATCHES = "\n".join(
    f'<pattern id="{role}" width="8" height="8" patternUnits="userSpaceOnUse">'
    f'<path d="{STROKES[kind]}" stroke="{ROLE[role]}" stroke-opacity=".3"/></pattern>'
    for role, kind in HATCH.items()
)
FILE = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 %(height)d" role="img"
 width="760" height="%(height)d">
<title>%(title)s</title>
<desc>%(description)s</desc>
<defs>
{HATCHES}
<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10" markerHeight="10"
 markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 1L10 5L0 9Z"/></marker>
</defs>
<rect width="760" height="%(height)d" rx="12" fill="{PAPER}"/>
<g font-family="Arial, Helvetica, sans-serif" font-size="14" text-anchor="middle" fill="{BLACK}"
 stroke-width="1.6">
%(parts)s
</g>
</svg>
"""
ORDERS = ((4, 1, 7, 5, 3, 9, 0, 8, 6, 2), (5, 6, 1, 2, 0, 8, 9, 3, 7, 4))  # ShardedSampler, seed 0


@dataclass(frozen=True)
class Config:
    """Draw the diagrams."""

    check: bool = False
    """Write nothing; exit 1 and name the files that are out of date."""
    folder: Path = Path(__file__).resolve().parents[1] / "notebooks" / "figures"
    """Where the files stand."""


class Card:
    """A drawing, as the list of its parts; later parts cover earlier ones."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: object, more: str = "") -> None:
        """Write one line around (x, y); `more` adds BOLD, MONO, START, END."""
        self.parts.append(f'<text x="{x:g}" y="{y + 5:g}"{more}>{escape(str(words))}</text>')

    def line(self, *points: tuple[float, float], colour: str = BLACK, more: str = TIP) -> None:
        """Draw a line through `points`; `more` is its TIP, BOTH_TIPS, DASHED, or nothing."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}"{more}/>')

    def box(self, x: float, y: float, w: float, h: float, *lines: str, fill: str = PAPER) -> None:
        """Draw a box with `lines` in its middle; `fill` is a role, with its hatch, or a colour."""
        colour = ROLE.get(fill, fill)
        edge = GREY if fill == PAPER else colour
        shape = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{min(6, w / 4):g}"'
        self.parts.append(f'{shape} fill="{PAPER}"/>')
        self.parts.append(f'{shape} fill="{colour}" fill-opacity=".25" stroke="{edge}"/>')
        if fill in HATCH:
            self.parts.append(f'{shape} fill="url(#{fill})"/>')
        for number, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 18 * (number - (len(lines) - 1) / 2), line)


def ddp_overview(card: Card) -> None:
    """Data parallelism: a global batch of six samples is dealt out to two ranks; each runs forward
    and backward through the whole model, an all-reduce makes the mean of the gradients, and both
    take the same step, so their weights stay equal.
    """
    card.text(64, 74, "global batch", BOLD)
    card.box(20, 88, 88, 118)
    for sample in range(6):
        card.box(28 + 40 * (sample % 2), 96 + 36 * (sample // 2), 32, 30, str(sample), fill="data")
    for rank, y in enumerate((18, 188)):
        middle = y + 54
        card.box(136, y, 608, 88)
        card.text(148, y + 16, f"rank {rank}: the whole model", BOLD + START)
        row = 111 + 72 * rank
        card.line((109, row), (122, row), (122, middle), (146, middle))
        card.box(148, y + 32, 68, 44, ("0 2 4", "1 3 5")[rank], fill="data")
        card.box(238, y + 32, 78, 44, "forward", fill="forward")
        card.box(338, y + 32, 88, 44, "backward", fill="backward")
        card.box(582, y + 32, 54, 44, "same", "step", fill="optimizer")
        card.box(658, y + 32, 72, 44, "weights", fill="parameters")
        for start, stop in ((217, 236), (317, 336), (427, 448), (559, 580), (637, 656)):
            card.line((start, middle), (stop, middle))
    card.line((694, 96), (694, 218), more=BOTH_TIPS)
    card.text(684, 147, "equal", END)
    card.box(450, 50, 108, 214, "all-reduce:", "mean of the", "gradients", fill="communication")


def ddp_ranks(card: Card) -> None:
    """Ranks and nodes: on two nodes with four GPUs each, one torchrun agent a node starts four
    processes, ranks 0 to 3 and ranks 4 to 7 of a world of 8; both nodes have local ranks 0 to 3,
    and both agents meet at a port of node 0.
    """
    for y, name in ((156, "rank"), (190, "local_rank"), (222, "GPU")):
        card.text(92, y, name, END)
    for node, (x, name) in enumerate(((104, "gpu07"), (434, "gpu08"))):
        card.text(x + 155, 24, f"node {node}: {name}", BOLD)
        card.box(x, 40, 310, 212)
        card.box(x + 14, 56, 138, 36, "torchrun agent", fill="other")
        card.line((x + 45, 92), (x + 45, 114), (x + 265, 114), more="")
        for local_rank, left in enumerate(range(x + 14, x + 300, 73)):
            card.line((left + 31, 114), (left + 31, 132))
            card.box(left, 134, 62, 106, fill="compute")
            card.text(left + 31, 156, 4 * node + local_rank, BOLD + ' font-size="20"')
            card.text(left + 31, 190, local_rank)
            card.text(left + 31, 222, f"cuda:{local_rank}")
    card.box(290, 56, 110, 36, "port 24711", fill="communication")
    card.line((257, 74), (288, 74))
    card.line((447, 74), (402, 74))
    card.line((104, 262), (104, 272), (744, 272), (744, 262), more="")
    card.text(424, 292, "world size 8: one process a GPU", BOLD)


def ddp_sampler(card: Card) -> None:
    """Samples dealt out to ranks: in each of two epochs ten samples are shuffled in another order
    and dealt out like cards to three ranks, which get 4, 3 and 3; the first six of the order are
    the first global batch, two from each rank.
    """
    card.text(130, 58, "shuffled", END)
    for rank, count in enumerate((4, 3, 3)):
        card.text(130, 112 + 38 * rank, f"rank {rank} gets {count}", END)
    for epoch, order in enumerate(ORDERS):
        left = 150 + 306 * epoch
        card.text(left + 144, 20, f"epoch {epoch}", BOLD)
        start, stop = left - 6, left + 170
        batch = ((start, 36), (stop, 36), (stop, 214), (start, 214), (start, 35))
        card.line(*batch, colour=GREY, more=DASHED)
        card.text(start, 232, "first global batch, B = 6", START)
        for place, sample in enumerate(map(str, order)):
            x, y = left + 28 * place + 8 * (place > 5), 98 + 38 * (place % 3)
            card.line((x + 12, 72), (x + 12, y), colour=RANK[place % 3], more="")
            card.box(x, 44, 24, 28, sample)
            card.box(x, y, 24, 28, sample, fill=RANK[place % 3])


def ddp_buckets(card: Card) -> None:
    """Buckets: the gradients of six layers fill three buckets from the last layer on; the
    all-reduce of a full bucket runs while backward computes earlier layers, so the step comes
    sooner than in the naive version, where every message waits for the end of backward.
    """
    for x, top in ((546, 166), (706, 284)):
        card.line((x, top), (x, 404), colour=GREY, more=DASHED)
    for y, name in ((34, "layers"), (74, "buckets"), (382, "time")):
        card.text(112, y, name, END)
    for layer in range(6):
        card.box(122 + 76 * layer, 18, 72, 32, f"layer {layer + 1}", fill="parameters")
    for bucket in range(3):
        card.box(426 - 152 * bucket, 58, 148, 32, f"bucket {bucket}", fill="gradients")
    card.line((576, 108), (122, 108))
    card.text(588, 108, "backward fills them", START)
    buckets = [(222 + 100 * bucket, 80, f"bucket {bucket}") for bucket in range(3)]
    layers = [(422 + 40 * layer, 40, str(layer + 1)) for layer in range(6)]
    card.text(16, 148, "overlapped: a full bucket leaves at once", BOLD + START)
    card.text(16, 266, "naive: all messages after backward", BOLD + START)
    for y, messages in ((148, buckets), (266, layers)):
        card.text(112, y + 34, "backward", END)
        card.text(112, y + 72, "all-reduce", END)
        for place in range(6):
            card.box(122 + 50 * place, y + 18, 50, 32, str(6 - place), fill="backward")
        for x, width, words in messages:
            card.box(x, y + 56, width, 32, words, fill="communication")
        card.box(x + width, y + 18, 44, 32, "step", fill="optimizer")
    card.line((548, 382), (704, 382), more=BOTH_TIPS)
    card.text(626, 398, "time saved")
    card.line((122, 382), (240, 382))


def ddp_evaluation(card: Card) -> None:
    """Uneven ranks: rank 0 has 2 items with mean loss 5 and rank 1 has 50 items with mean loss 1;
    the mean of the means is 3.00, but both sums divided by both counts are 60 / 52 = 1.15.
    """
    for x, name in ((180, "items"), (368, "sum"), (448, "count"), (632, "mean")):
        card.text(x, 24, name, BOLD)
    for rank, y, height, total, count in ((0, 42, 36, 10, 2), (1, 88, 104, 50, 50)):
        card.box(16, y, 728, height)
        card.text(28, y + height / 2, f"rank {rank}", BOLD + START)
        for item in range(count):
            card.box(96 + 17 * (item % 10), y + 12 + 17 * (item // 10), 12, 12, fill=RANK[rank])
        for x, number in ((368, total), (448, count), (632, total // count)):
            card.text(x, y + height / 2, number, ' font-size="18"')
            card.line((x, 192), (x, 216))
    right = f"(10 + 50) / (2 + 50) = {(10 + 50) / (2 + 50):.2f}"
    card.box(292, 218, 232, 56, "right: sums and counts", right, fill=GREEN)
    wrong = f"(5 + 1) / 2 = {(5 + 1) / 2:.2f}"
    card.box(540, 218, 184, 56, "wrong: mean of means", wrong, fill=RED)


def ddp_rendezvous(card: Card) -> None:
    """Rendezvous: the torchrun agents of two nodes, gpu07 and gpu08, meet at port 24711 of gpu07
    for job 4711; a table says what each of the six arguments of torchrun tells them.
    """
    card.box(16, 18, 200, 56, "agent on gpu07", "opens the port", fill="other")
    card.box(544, 18, 200, 56, "agent on gpu08", "knocks until it is open", fill="other")
    card.box(290, 18, 180, 56, "gpu07:24711", "job 4711", fill="communication")
    card.line((217, 46), (288, 46))
    card.line((543, 46), (472, 46))
    rows = (
        ("--nnodes=2", "how many agents to wait for, one a node"),
        ("--nproc-per-node=4", "how many ranks this agent starts, one a GPU"),
        ("--rdzv-id=4711", "which job: agents with the same number belong together"),
        ("--rdzv-backend=c10d", "how they meet: PyTorch's own store, held by one agent"),
        ("--rdzv-endpoint=gpu07:24711", "where: the head node, port 20000 + job id % 20000"),
        ("--rdzv-conf=is_host=1", "who holds the store: 1 on the head node, 0 on all others"),
    )
    card.text(24, 104, "argument of torchrun", BOLD + START)
    card.text(284, 104, "what it says", BOLD + START)
    for y, (argument, meaning) in zip(range(138, 354, 36), rows, strict=True):
        card.line((16, y - 18), (744, y - 18), colour=LIGHT_GREY, more="")
        card.text(24, y, argument, MONO + START)
        card.text(284, y, meaning, START)


def lesson(card: Card) -> None:
    """The rhythm of a lesson: why, build, check, predict and measure, run as a job; a check
    answers not started, not yet or done, and the first two lead back to building.
    """
    steps = (
        ("Why", "a question", "and a picture"),
        ("Build", "write the body", "of a TODO"),
        ("Check", "on real", "processes"),
        ("Predict", "a number,", "then measure"),
        ("Run as a job", "with your own", "functions in it"),
    )
    for x, (name, *lines) in zip(range(16, 760, 150), steps, strict=True):
        card.box(x, 18, 128, 92, fill="compute")
        card.text(x + 64, 40, name, BOLD + ' font-size="16"')
        for y, line in zip((68, 88), lines, strict=True):
            card.text(x + 64, y, line)
    for x in (145, 295, 595):
        card.line((x, 64), (x + 19, 64))
    card.line((380, 111), (380, 134))
    states = (("not started", ORANGE), ("not yet: why", RED), ("done", GREEN))
    for y, (state, colour) in zip((136, 182, 228), states, strict=True):
        card.box(316, y, 128, 38, state, fill=colour)
    card.line((315, 201), (230, 201), (230, 112))
    card.line((315, 155), (230, 155), more="")
    card.text(218, 178, "try, with a hint", END)
    card.line((445, 247), (530, 247), (530, 112))
    card.text(542, 178, "go on", START)


HEIGHTS = {ddp_overview: 294, ddp_ranks: 314, ddp_sampler: 254, ddp_buckets: 424}
HEIGHTS |= {ddp_evaluation: 292, ddp_rendezvous: 346, lesson: 284}


def main(config: Config) -> None:
    """Bring every diagram up to date, or only name those that are not."""
    is_stale = False
    for draw, height in HEIGHTS.items():
        description = escape(" ".join(draw.__doc__.split()))
        words = {"title": description.partition(":")[0], "description": description}
        draw(card := Card())
        text = FILE % {"height": height, **words, "parts": "\n".join(card.parts)}
        path = config.folder / f"{draw.__name__}.svg"
        if path.exists() and path.read_bytes() == text.encode():
            continue
        is_stale = True
        if not config.check:
            path.write_bytes(text.encode())
        print(f"{'out of date' if config.check else 'wrote'}: {path.name}")
    if config.check and is_stale:
        print("run: python scripts/draw_diagrams.py")
        raise SystemExit(1)


if __name__ == "__main__":
    command_line(main, Config)
