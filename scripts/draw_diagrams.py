"""Draw the diagrams in notebooks/figures/, as SVG files.

    python scripts/draw_diagrams.py            write what is out of date
    python scripts/draw_diagrams.py --check    write nothing; exit 1 if something is out of date

A diagram is a function that puts boxes, lines and words on a card. Its docstring is the picture's
title and its description, for people who cannot see it. The card is opaque, so it can also be read
in a dark notebook. Colours and hatches mean what they mean in
`manyhands.instruments.figures`. Lengths are in SVG units, from the card's top left corner.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from manyhands.instruments.figures import (
    BLACK,
    GREEN,
    GREY,
    HATCH,
    LIGHT_GREY,
    ORANGE,
    RANK,
    RED,
    ROLE,
)
from manyhands.ranks.runtime import command_line

PAPER = "#fcfcfa"
BOLD = ' font-weight="bold"'
MONO = ' font-family="Menlo, Consolas, monospace"'
START = ' text-anchor="start"'
END = ' text-anchor="end"'
DASHED = ' stroke-dasharray="6 4"'
TIP = ' marker-end="url(#tip)"'
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

COMMON = ((0, 3), (3, 4), (4, 6), (6, 8), (8, 9), (9, 12))  # from pieces of 3 to pieces of 4


PATTERNS = {  # collective: what it does, and whose numbers a rank has in a chunk before and after
    "broadcast": ("rank 0's numbers to all", lambda r, c: "" if r else "0", lambda r, c: "0"),
    "gather": (
        "all chunks to rank 0",
        lambda r, c: f"{r}" * (r == c),
        lambda r, c: f"{c}" * (not r),
    ),
    "reduce": ("the sum to rank 0", lambda r, c: f"{r}", lambda r, c: "" if r else "sum"),
    "all-gather": ("all chunks to all", lambda r, c: f"{r}" * (r == c), lambda r, c: f"{c}"),
    "all-reduce": ("the sum to all", lambda r, c: f"{r}", lambda r, c: "sum"),
    "reduce-scatter": (
        "a chunk of the sum each",
        lambda r, c: f"{r}",
        lambda r, c: "sum" * (r == c),
    ),
}


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
        card.box(658, y + 32, 72, 44, "weights", fill="weights")
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
        start = left - 6
        stop = left + 170
        batch = ((start, 36), (stop, 36), (stop, 214), (start, 214), (start, 35))
        card.line(*batch, colour=GREY, more=DASHED)
        card.text(start, 232, "first global batch, B = 6", START)
        for place, sample in enumerate(map(str, order)):
            x = left + 28 * place + 8 * (place > 5)
            y = 98 + 38 * (place % 3)
            card.line((x + 12, 72), (x + 12, y), colour=RANK[place % 3], more="")
            card.box(x, 44, 24, 28, sample)
            card.box(x, y, 24, 28, sample, fill=RANK[place % 3])


def data_parallel_buckets(card: Card) -> None:
    """Buckets: the gradients of six layers fill three buckets from the last layer on; the
    all-reduce of a full bucket runs while backward computes earlier layers, so the step comes
    sooner than in the naive version, where every message waits for the end of backward.
    """
    for x, top in ((546, 166), (706, 284)):
        card.line((x, top), (x, 404), colour=GREY, more=DASHED)
    for y, name in ((34, "layers"), (74, "buckets"), (382, "time")):
        card.text(112, y, name, END)
    for layer in range(6):
        card.box(122 + 76 * layer, 18, 72, 32, f"layer {layer + 1}", fill="weights")
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
        ("--rdzv-endpoint=gpu07:24711", "where: the head node, port 20000 + job id % 10000"),
        ("--rdzv-conf=is_host=1", "who holds the store: 1 on the head node, 0 on all others"),
    )
    card.text(24, 104, "argument of torchrun", BOLD + START)
    card.text(284, 104, "what it says", BOLD + START)
    for y, (argument, meaning) in zip(range(138, 354, 36), rows, strict=True):
        card.line((16, y - 18), (744, y - 18), colour=LIGHT_GREY, more="")
        card.text(24, y, argument, MONO + START)
        card.text(284, y, meaning, START)


def loss_surface_grid(card: Card) -> None:
    """The points of a picture are dealt out: of nine points rank 0 computes five and rank 1 four;
    each has a table with zeros where the other is at work; the sum of both tables, an all-reduce,
    is the whole picture, and both ranks have it.
    """
    card.text(118, 26, "points of the plane", BOLD)
    grid_of(card, 46, 70, [RANK[point % 2] for point in range(9)], [""] * 9)
    for rank, y in enumerate((44, 192)):
        card.text(352, y - 18, f"rank {rank}: its table", BOLD)
        losses = [f"{point + 1}" if point % 2 == rank else "0" for point in range(9)]
        fills = [RANK[rank] if loss != "0" else PAPER for loss in losses]
        grid_of(card, 280, y, fills, losses, 40)
        card.line((200, 110 + 60 * rank), (270, y + 60))
        card.line((410, y + 60), (472, 110 + 60 * rank))
    card.box(476, 84, 96, 116, "all-reduce:", "the sum", fill="communication")
    card.line((573, 142), (592, 142))
    card.text(668, 26, "both ranks: all", BOLD)
    fills = [RANK[point % 2] for point in range(9)]
    grid_of(card, 598, 70, fills, [f"{point + 1}" for point in range(9)])


def grid_of(
    card: Card, x: float, y: float, fills: list[str], words: list[str], size: float = 48
) -> None:
    """Draw nine cells, row by row."""
    for point, (fill, word) in enumerate(zip(fills, words, strict=True)):
        row, column = divmod(point, 3)
        lines = [word] * bool(word)
        card.box(x + column * size, y + row * size, size - 6, size - 6, *lines, fill=fill)


def batch_size_halves(card: Card) -> None:
    """Two halves of one question: the batch size sets how many images per second the machine trains
    on, and how many steps the task needs to a target; both together make the time to the target.
    """
    card.box(24, 92, 128, 60, "batch size", fill="data")
    halves = (
        (22, "images per second", "the machine's half", "section 1", PAPER),
        (140, "steps to the target", "the task's half", "sections 2 to 5", PAPER),
    )
    for y, name, whose, where, fill in halves:
        card.box(252, y, 212, 84, name, whose, where, fill=fill)
        card.line((153, 122), (248, y + 42))
        card.line((465, y + 42), (556, 122))
    card.box(560, 82, 176, 80, "time to the target", "section 6")


def collectives_overview(card: Card) -> None:
    """Six collectives on four ranks with four chunks each, before and after: broadcast copies one
    rank's numbers to all, reduce adds all up on one rank, gather collects a chunk of each on one
    rank, all-gather on all, reduce-scatter leaves each rank one chunk of the sum, and all-reduce
    leaves the whole sum on all.
    """
    for place, (name, (words, before, after)) in enumerate(PATTERNS.items()):
        left = 16 + 372 * (place % 2)
        top = 14 + 176 * (place // 2)
        card.text(left, top + 12, name, BOLD + START)
        card.text(left + 356, top + 12, words, END)
        card.text(left + 32, top + 37, "rank", END)
        card.line((left + 188, top + 104), (left + 208, top + 104))
        for x, holds in ((left + 40, before), (left + 212, after)):
            for rank in range(4):
                card.text(x + 36 * rank + 17, top + 37, rank, BOLD)
                for chunk in range(4):
                    chunk_of(card, x + 36 * rank, top + 49 + 28 * chunk, holds(rank, chunk))
    words = "a column is what a rank holds, in four chunks; the number in a chunk says whose it is"
    card.text(380, 556, words)


def chunk_of(card: Card, x: float, y: float, whose: str) -> None:
    """Draw a chunk: a rank's in its colour, a sum with a stripe of every rank, or an empty one."""
    if whose == "sum":
        card.box(x, y, 34, 26)
        for rank in range(4):
            card.box(x + 3 + 7 * rank, y + 19, 7, 4, fill=RANK[rank])
        card.text(x + 17, y + 9, "sum")
    elif whose:
        card.box(x, y, 34, 26, whose, fill=RANK[int(whose)])
    else:
        card.box(x, y, 34, 26, fill=LIGHT_GREY)


def collectives_tree(card: Card) -> None:
    """Two broadcasts on eight ranks: on the left rank 0 sends to ranks 1 to 7, seven messages in a
    row; on the right the tree needs three rounds: 0 to 1, then 0 to 2 and 1 to 3, then four
    messages at once from ranks 0 to 3 to ranks 4 to 7.
    """
    naive = [[(0, rank)] for rank in range(1, 8)]
    tree = [[(rank, rank + step) for rank in range(step)] for step in (1, 2, 4)]
    for left, rounds, title in (
        (84, naive, "naive: 7 messages in a row"),
        (456, tree, "tree: 3 rounds"),
    ):
        card.text(left + 133, 22, title, BOLD)
        have = {0}
        for number in range(len(rounds) + 1):
            y = 56 + 42 * number
            card.text(left - 20, y, f"round {number}" if number else "start", END)
            for sender, receiver in rounds[number - 1] if number else ():
                card.line((left + 38 * sender, y - 30), (left + 38 * receiver, y - 13))
                have.add(receiver)
            for rank in range(8):
                colour = RANK[0] if rank in have else PAPER
                card.box(left + 38 * rank - 11, y - 11, 22, 22, str(rank), fill=colour)
    card.box(445, 256, 22, 22, fill=RANK[0])
    card.text(480, 267, "a rank that has the tensor", START)
    card.box(445, 292, 22, 22)
    card.text(480, 303, "a rank that does not", START)


def collectives_ring(card: Card) -> None:
    """One step of the ring: four ranks, each with room for four chunks; every rank sends one chunk,
    here its own, to the next rank, and receives another from the rank before it, all at once.
    """
    for rank, (x, y) in enumerate(((24, 44), (428, 44), (428, 196), (24, 196))):
        card.box(x, y, 308, 84)
        cells = y + (8 if rank < 2 else 40)
        card.text(x + 12, y + (64 if rank < 2 else 20), f"rank {rank}", BOLD + START)
        for chunk in range(4):
            cell = x + 12 + 72 * chunk
            colour = RANK[chunk]
            if chunk == (rank - 1) % 4:
                left = cell
                right = cell + 68
                top = cells
                bottom = cells + 36
                way = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
                card.line(*way, colour=colour, more=DASHED)
                card.text(cell + 34, cells + 18, f"{chunk} arrives")
            elif chunk == rank:
                card.box(cell, cells, 68, 36, f"chunk {chunk}", fill=colour)
            else:
                card.box(cell, cells, 68, 36)
    card.line((70, 51), (70, 24), (474, 24), (474, 50))
    card.line((546, 89), (546, 234))
    card.line((618, 273), (618, 300), (214, 300), (214, 274))
    card.line((286, 235), (286, 90))
    card.text(416, 162, "all four at the same time")


def collectives_deadlock(card: Card) -> None:
    """A deadlock and the way out: two ranks each block in send, waiting for the other to receive,
    and neither gets to its recv; when send and receive are started together, both messages pass.
    """
    card.text(194, 24, "both send first: nobody goes on", BOLD)
    card.text(566, 24, "start both, then wait: both pass", BOLD)
    card.line((380, 14), (380, 270), colour=LIGHT_GREY, more="")
    for rank in range(2):
        for left in (24, 396):
            card.text(left + 65 + 210 * rank, 58, f"rank {rank}", BOLD)
        x = 24 + 210 * rank
        card.box(x, 76, 130, 52, "send", "blocks here", fill=RED)
        card.box(x, 188, 130, 52, "recv", "is not reached", fill=LIGHT_GREY)
        x = 396 + 210 * rank
        card.box(x, 76, 130, 36, "start the send", fill="communication")
        card.box(x, 140, 130, 36, "start the recv", fill="communication")
        card.box(x, 204, 130, 36, "wait for both", fill=GREEN)
        card.line((x + 65, 113), (x + 65, 138))
        card.line((x + 65, 177), (x + 65, 202))
    card.line((155, 112), (232, 206), colour=RED, more=DASHED + TIP)
    card.line((233, 112), (156, 206), colour=RED, more=DASHED + TIP)
    card.text(194, 92, "waits for")
    card.line((527, 94), (604, 156))
    card.line((605, 94), (528, 156))
    card.text(566, 88, "message")


def data_parallel_server(card: Card) -> None:
    """A parameter server beside a ring, for n = 4 and P parameters of four bytes: all workers'
    gradients go into the server and its weights come out, 2n times 4P bytes through one link; in
    the ring each rank sends and receives 2 (n-1)/n times 4P bytes, whatever the number of ranks.
    """
    card.text(190, 24, "parameter server", BOLD)
    card.text(574, 24, "ring all-reduce", BOLD)
    card.line((382, 14), (382, 328), colour=LIGHT_GREY, more="")
    card.box(
        60, 48, 260, 52, "server: has the optimizer", "2n x 4P bytes in and out", fill="optimizer"
    )
    for worker in range(4):
        x = 16 + 90 * worker
        card.box(x, 190, 80, 36, f"worker {worker + 1}", fill="compute")
        card.line((x + 26, 189), (95 + 58 * worker, 102))
        card.line((110 + 58 * worker, 101), (x + 54, 188), more=DASHED + TIP)
    card.line((24, 252), (64, 252))
    card.text(76, 252, "gradients in: 4P bytes each", START)
    card.line((24, 278), (64, 278), more=DASHED + TIP)
    card.text(76, 278, "weights out: 4P bytes each", START)
    for rank, (x, y) in enumerate(((406, 64), (626, 64), (626, 194), (406, 194))):
        card.box(x, y, 112, 52, f"rank {rank}", "optimizer", fill="optimizer")
    card.line((519, 90), (624, 90))
    card.line((682, 117), (682, 192))
    card.line((625, 220), (520, 220))
    card.line((462, 193), (462, 118))
    card.text(572, 146, "4 (n-1)/n x 4P bytes")
    card.text(572, 166, "in and out of each rank")
    for x, times in ((190, lambda n: 2 * n), (572, lambda n: 4 * (n - 1) / n)):
        words = [f"n = {n}: {4 * times(n):g}P bytes" for n in (4, 8)]
        card.text(x, 316, ",  ".join(words), BOLD)


def memory_stages(card: Card) -> None:
    """What each of three ranks holds in ZeRO stages 0 to 3: in stage 0 all have the whole weights,
    gradients and optimizer state; stage 1 cuts the optimizer state into three shards, stage 2 also
    the gradients, stage 3 also the weights.
    """
    parts = (("weights", 1), ("gradients", 1), ("optimizer", 2))
    for stage in range(4):
        left = 20 + 186 * stage
        card.text(left + 80, 24, f"stage {stage}", BOLD)
        for rank in range(3):
            card.text(left + 18 + 54 * rank + 8, 296, f"rank {rank}")
            y = 44.0
            for number, (role, height) in enumerate(parts):
                whole = 56 * height
                x = left + 4 + 54 * rank
                card.box(x, y, 46, whole)
                if stage >= 3 - number:
                    card.box(x, y + whole / 3 * rank, 46, whole / 3, "1/3", fill=role)
                else:
                    card.box(x, y, 46, whole, "all", fill=role)
                y += whole + 6
    for number, (role, _) in enumerate(parts):
        card.box(130 + 180 * number, 322, 22, 18, fill=role)
        card.text(160 + 180 * number, 331, role, START)


def fsdp_unit(card: Card) -> None:
    """A step of FSDP on one rank, with a root and two units: in forward each unit is gathered while
    the one before it computes, and is freed after it has computed; the root stays. In backward
    unit 2 and then unit 1 are gathered again; each computes its gradients, is freed, and is reduced
    by a reduce-scatter, while computing waits. The root is reduced and freed last.
    """
    lanes = {
        "compute": [
            *(("forward", *box) for box in ((166, 200, "root"), (208, 262, "1"))),
            *(("forward", *box) for box in ((264, 318, "2"), (320, 354, "root"))),
            *(("backward", *box) for box in ((362, 396, "root"), (404, 490, "2"))),
            *(("backward", *box) for box in ((532, 618, "1"), (660, 694, "root"))),
        ],
        "gather": [
            *(("communication", *box) for box in ((124, 164, "root"), (166, 206, "1"))),
            *(("communication", *box) for box in ((208, 248, "2"), (362, 402, "2"))),
            ("communication", 404, 444, "1"),
        ],
        "reduce-scatter": [
            *(("communication", *box) for box in ((492, 530, "2"), (620, 658, "1"))),
            ("communication", 696, 736, "root"),
        ],
        "root is whole": [("weights", 124, 694, "")],
        "unit 1 is whole": [("weights", 166, 262, ""), ("weights", 404, 618, "")],
        "unit 2 is whole": [("weights", 208, 318, ""), ("weights", 362, 490, "")],
    }
    card.text(239, 20, "forward", BOLD)
    card.text(549, 20, "backward", BOLD)
    for lane, (words, boxes) in enumerate(lanes.items()):
        y = 38 + 44 * lane
        card.text(12, y + 17, words, START)
        for role, left, right, name in boxes:
            card.box(left, y, right - left, 34, *([name] if name else []), fill=role)
    card.line((358, 34), (358, 292), more=DASHED)
    card.line((124, 312), (736, 312))
    card.text(112, 312, "time", END)


def pipeline_stages(card: Card) -> None:
    """A pipeline of three stages on three ranks: micro-batches 0 to 3 enter at rank 0; while rank 0
    works on micro-batch 2, rank 1 works on 1 and rank 2 on 0; activations go to the next rank,
    gradients come back, and the loss is on the last rank.
    """
    card.text(16, 24, "micro-batches", BOLD + START)
    card.box(16, 96, 66, 42, "3", fill="data")
    layers = ("embedding, block 0", "blocks 1 and 2", "block 3, norm, head")
    for rank, words in enumerate(layers):
        x = 124 + 202 * rank
        card.box(x, 44, 160, 146)
        card.text(x + 80, 62, f"rank {rank}: stage {rank}", BOLD)
        card.text(x + 80, 84, words)
        card.box(x + 22, 102, 116, 32, f"forward {2 - rank}", fill="forward")
        card.box(x + 22, 146, 116, 32, "its backward", fill="backward")
        card.line((x - 40 if rank else 84, 117), (x - 3, 117))
        if rank:
            card.line((x - 3, 162), (x - 40, 162), colour=RED)
            card.text(x - 21, 206, "gradient")
            card.text(x - 21, 30, "activation")
    card.line((690, 117), (716, 117))
    card.text(736, 117, "loss", BOLD)


def tensor_mlp(card: Card) -> None:
    """An MLP cut over two ranks: x is copied to both; each multiplies with its columns of A, takes
    gelu, and multiplies with its rows of B; an all-reduce adds the two parts to y on both.
    Backward, an all-reduce adds the gradients of x at f.
    """
    card.box(16, 96, 56, 60, "x", fill="activations")
    card.line((74, 126), (108, 126))
    card.box(112, 104, 44, 44, "f", fill="communication")
    for rank, y in enumerate((28, 156)):
        card.line((156, 126), (176, y + 36), (206, y + 36))
        card.text(424, y - 8, f"rank {rank}", BOLD)
        card.box(206, y + 6, 120, 60, f"A{rank}", "columns of A", fill="weights")
        card.line((328, y + 36), (362, y + 36))
        card.box(364, y + 6, 80, 60, "gelu", fill=LIGHT_GREY)
        card.line((446, y + 36), (480, y + 36))
        card.box(482, y + 6, 100, 60, f"B{rank}", "rows of B", fill="weights")
        card.line((582, y + 36), (606, y + 36), (628, 126), more="")
    card.box(628, 104, 44, 44, "g", fill="communication")
    card.line((674, 126), (700, 126))
    card.box(702, 96, 44, 60, "y", fill="activations")
    card.text(16, 250, "f: copy forward, all-reduce backward", START)
    card.text(744, 250, "g: all-reduce forward, copy backward", END)


def first_job_map(card: Card) -> None:
    """Ranks and devices: two nodes, node1 and node2, with two GPUs each, and one process on each
    GPU; ranks 0 to 3 make a world of 4, and each node has local ranks 0 and 1, so rank 3 is local
    rank 1 on node2, device cuda:1. Links inside a node are fast, the network between nodes is slow.
    """
    card.text(380, 22, "world size 4: one process a GPU", BOLD)
    card.line((16, 52), (16, 42), (744, 42), (744, 52), more="")
    card.line((326, 165), (434, 165), more="")
    for y, words in ((152, "slow"), (178, "network")):
        card.text(380, y, words)
    for node, x in enumerate((16, 434)):
        card.box(x, 62, 310, 170)
        card.text(x + 155, 80, f"node{node + 1}", BOLD)
        card.line((x + 134, 165), (x + 176, 165), more=' stroke-width="8"')
        for y, words in ((148, "fast"), (182, "links")):
            card.text(x + 155, y, words)
        for local_rank, left in enumerate((x + 14, x + 176)):
            card.box(left, 98, 120, 122)
            card.text(left + 60, 115, f"GPU cuda:{local_rank}")
            card.box(left + 6, 132, 108, 80, fill="compute")
            card.text(left + 60, 158, f"rank {2 * node + local_rank}", BOLD + ' font-size="20"')
            card.text(left + 60, 190, f"local rank {local_rank}")
    card.text(600, 262, "rank 3 is local rank 1 on node2, device cuda:1", END)
    card.line((608, 262), (670, 262), (670, 214))


def first_job_cluster(card: Card) -> None:
    """How a job travels: from your browser or terminal to the login node, where sbatch puts it at
    the end of Slurm's queue, and from there to the compute nodes, which have GPUs but no internet.
    On the login node prepare_data.py fetches data from the internet into the shared file system,
    where both kinds of node read and write the same files.
    """
    for x, width, name in ((148, 218, "login node"), (390, 172, "Slurm's queue")):
        card.box(x, 18, width, 168)
        card.text(x + 12, 36, name, BOLD + START)
    card.text(354, 36, "has internet", END)
    card.box(16, 42, 106, 76, "your browser", "(JupyterHub)", "or terminal")
    card.box(16, 130, 106, 40, "internet", fill="other")
    card.box(154, 54, 206, 52, fill="compute")
    card.box(154, 130, 206, 40, fill="data")
    for y, words in ((71, "sbatch"), (89, "sbatch/first_job.sbatch"), (150, "prepare_data.py")):
        card.text(257, y, words, MONO)
    for x, whose, place in ((399, "yours", "3rd"), (452, "other", "2nd"), (505, "other", "1st")):
        card.box(x, 54, 48, 52, whose, place, fill="compute" if whose == "yours" else "other")
    for y, words in ((136, "three jobs wait,"), (156, "yours is last")):
        card.text(476, y, words)
    card.box(590, 18, 154, 168)
    card.text(667, 36, "compute nodes", BOLD)
    for node, y in enumerate((54, 102)):
        card.box(597, y, 140, 42)
        card.text(604, y + 21, f"node{node + 1}", START)
        for x in (653, 694):
            card.box(x, y + 6, 37, 30, "GPU", fill="compute")
    card.text(667, 166, "no internet")
    shared_files(card)
    for start, stop in ((123, 146), (361, 397), (554, 588)):
        card.line((start, 80), (stop, 80))
    card.line((123, 150), (152, 150))
    card.line((300, 171), (300, 270))


def shared_files(card: Card) -> None:
    """Draw the file system that login node and compute nodes share."""
    card.box(16, 236, 728, 86)
    card.text(28, 254, "one shared file system", BOLD + START)
    card.text(388, 254, "the same files on all nodes", START)
    for x, width, words, fill in (
        (28, 184, "the course's folder", PAPER),
        (236, 128, "data", "data"),
        (388, 344, "runs/: results and reports", "compute"),
    ):
        card.box(x, 272, width, 38, words, fill=fill)
    for x in (200, 667):
        card.line((x, 188), (x, 234), more=BOTH_TIPS)
        card.text(x - 10, 211, "read and write", END)


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


def large_batch_levers(card: Card) -> None:
    """Four levers of a large batch: with sixteen times the batch there are sixteen times fewer
    steps; the learning rate makes each step longer, noise can be put back, the batch can grow in
    the course of the training, and another algorithm bears longer steps.
    """
    for y, name, num_steps in ((30, "small batch", 16), (96, "large batch", 1)):
        card.text(24, y + 14, name, BOLD + START)
        for number in range(num_steps):
            card.box(130 + 37.5 * number, y, 30, 28, fill="optimizer")
    card.text(184, 110, "the same images in fewer steps: what can be done about it?", START)
    levers = (
        ("learning rate", "longer steps,", "after a warm-up"),
        ("gradient noise", "put back what", "a large batch lacks"),
        ("the batch", "start small,", "grow later"),
        ("the algorithm", "norms, and", "lesson 08"),
    )
    for number, (name, *words) in enumerate(levers):
        card.box(24 + 182 * number, 160, 166, 84)
        card.text(107 + 182 * number, 178, name, BOLD)
        for line, word in enumerate(words):
            card.text(107 + 182 * number, 202 + 20 * line, word)


def layerwise_ratio(card: Card) -> None:
    """A rate for each layer: in three layers the norms of the weights and of the gradients differ
    several times; one rate moves them by very different shares of their norms; with a trust ratio
    each layer moves by the same share.
    """
    heads = ((24, "layer"), (190, "|weights|"), (330, "|gradient|"))
    for x, name in heads:
        card.text(x, 24, name, BOLD + START)
    card.text(486, 24, "one rate for all", BOLD)
    card.text(660, 24, "trust ratio", BOLD)
    rows = (
        ("embedding", 130, 12, 8),
        ("a norm's scale", 60, 56, 84),
        ("the last layer", 34, 70, 134),
    )
    for number, (name, weight, gradient, step) in enumerate(rows):
        y = 44 + 62 * number
        card.box(20, y, 150, 40, name)
        card.box(190, y, weight, 40, fill="weights")
        card.box(330, y, gradient, 40, fill="gradients")
        card.box(419, y, step, 40, fill="optimizer")
        card.box(612, y, 96, 40, "0.1 %", fill="optimizer")
    card.text(24, 246, "green: the length of a step, as a share of the layer's norm", START)


def checkpoint_sharded(card: Card) -> None:
    """Who writes what: each of four ranks holds three rows of w and all of b; every rank writes its
    rows into a file of its own, and b, which all of them hold, is written by rank 0 alone; when all
    have written, rank 0 writes index.json, and only then does the checkpoint exist.
    """
    card.text(14, 84, "in memory", START)
    card.text(14, 178, "on the disk", START)
    for rank in range(4):
        x = 120 + 160 * rank
        card.text(x + 70, 22, f"rank {rank}", BOLD)
        card.box(x, 40, 140, 92)
        words, colour = ("b", GREY) if rank else ("b: written", "weights")
        card.box(x + 10, 48, 120, 34, words, fill=colour)
        card.box(x + 10, 90, 120, 34, f"w, rows {3 * rank}-{3 * rank + 2}", fill="weights")
        card.line((x + 70, 132), (x + 70, 160))
        card.box(x, 160, 140, 38, f"rank-{rank:05d}.pt", fill="data")
        card.line((x + 70, 198), (x + 70, 222), more="")
    card.line((190, 222), (670, 222), more="")
    card.line((430, 222), (430, 250))
    card.text(444, 237, "all have written", START)
    card.box(300, 250, 260, 40, "index.json: the commit", fill="optimizer")
    card.text(14, 270, "rank 0, at the end:", START)


def checkpoint_reshard(card: Card) -> None:
    """From four ranks to three: a vector of twelve numbers lies in four stored pieces; each of the
    three ranks that load owns four numbers, and copies what its own box has in common with
    each stored one: three numbers and one, two and two, one and three.
    """
    card.text(14, 54, "stored by 4", START)
    card.text(14, 186, "owned by 3", START)
    for rank in range(4):
        words = f"{3 * rank} to {3 * rank + 2}"
        card.text(120 + 150 * rank + 75, 20, f"rank-{rank:05d}.pt")
        card.box(122 + 150 * rank, 34, 146, 40, words, fill=RANK[rank])
    for rank in range(3):
        words = f"{4 * rank} to {4 * rank + 3}"
        card.box(122 + 200 * rank, 166, 196, 40, words, fill=RANK[rank])
        card.text(120 + 200 * rank + 100, 222, f"rank {rank}", BOLD)
    for start, stop in COMMON:
        x = 120 + 25 * (start + stop)
        card.line((x, 74), (x, 166))
        card.text(x + 7, 120, stop - start, START)


def checkpoint_commit(card: Card) -> None:
    """Complete or absent: three ranks write their files at different speeds and wait for the
    slowest; rank 0 then writes the index. A run that is killed before the index is there goes on
    from the checkpoint before; a run that is killed later goes on from this one.
    """
    card.text(300, 20, "one save", BOLD)
    for rank, stop in enumerate((330, 400, 270)):
        y = 36 + 44 * rank
        card.text(14, y + 17, f"rank {rank}", START)
        card.box(90, y, stop - 90, 34, "write, fsync", fill="data")
        if stop < 400:
            card.box(stop + 2, y, 398 - stop, 34, fill="idle")
    card.box(404, 36, 96, 34, "the index", fill="optimizer")
    card.line((502, 30), (502, 236), more=DASHED)
    card.line((90, 178), (740, 178))
    card.text(78, 178, "time", END)
    card.box(90, 194, 406, 40, "killed here: the checkpoint before it counts", fill=GREY)
    card.box(508, 194, 232, 40, "killed here: it counts", fill="optimizer")


HEIGHTS = {
    lesson: 284,
    first_job_map: 284,
    first_job_cluster: 340,
    loss_surface_grid: 330,
    batch_size_halves: 246,
    large_batch_levers: 264,
    layerwise_ratio: 262,
    collectives_overview: 578,
    collectives_tree: 376,
    collectives_ring: 324,
    collectives_deadlock: 284,
    data_parallel_server: 342,
    memory_stages: 354,
    fsdp_unit: 326,
    checkpoint_sharded: 306,
    checkpoint_reshard: 246,
    checkpoint_commit: 252,
    pipeline_stages: 224,
    tensor_mlp: 272,
    data_parallel_buckets: 424,
    ddp_overview: 294,
    ddp_ranks: 314,
    ddp_sampler: 254,
    ddp_evaluation: 292,
    ddp_rendezvous: 346,
}


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
