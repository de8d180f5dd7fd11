"""The figures of a run's report. Each draws into one Axes and returns the sentence below it."""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation
from PIL import Image  # matplotlib needs it too

from manyhands.instruments.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    RED,
    SKY,
    label,
    lines,
    new_figure,
    png,
    stack,
)
from manyhands.instruments.meters import PHASES, SAMPLE_EVERY_S, STEP_PHASES, duration, scaled
from manyhands.training.page import Card
from manyhands.training.record import (
    Device,
    Record,
    Series,
    Span,
    loss_words,
    mean_busy,
    noun,
    split,
)

WIDTH_IN = 3.8  # as wide as the screen of a phone
ROW_IN = 0.2
DENSE_IN = 0.12  # rows lower than this have no room for words
FEW = 8  # devices that leave room for another figure below them
MANY = 150  # points that a curve of this size can show


# ---- words -------------------------------------------------------------------------------------


def count_label(record: Record) -> str:
    """The axis that counts them."""
    return f"{noun(record)} done" if "noun" in record.about else "step"


def count_axis(ax: Axes, record: Record) -> None:
    """Let the axis of tasks, of which there may be few, go from none to all of them."""
    if "noun" in record.about:
        ax.set_xlim(0, record.about["config"]["steps"] + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


# ---- the time axis -----------------------------------------------------------------------------


class Clock:
    """A time axis on which only the time counts in which the run was running.

    A run that waited in the queue for hours between two lives has a narrow gap there, and its
    ticks go on counting behind it.
    """

    def __init__(self, lives: Sequence[Span]) -> None:
        self.lives = lives
        lengths_s = [end_s - begin_s for begin_s, end_s in lives]
        self.total_s = sum(lengths_s)
        self.before_s = list(accumulate(lengths_s, initial=0.0))[:-1]  # of each life
        self.gap_s = 0.04 * self.total_s
        self.unit = "s"
        self.unit_s = 1.0
        if self.total_s > 180:
            self.unit = "min"
            self.unit_s = 60.0
        if self.total_s > 3 * 3600:
            self.unit = "h"
            self.unit_s = 3600.0

    def place(self, life: int, time_s: float) -> float:
        """Where a moment of one life lies on the axis."""
        begin_s, end_s = self.lives[life]
        into_s = min(max(time_s, begin_s), end_s) - begin_s
        return self.before_s[life] + life * self.gap_s + into_s

    def label(self, ax: Axes) -> None:
        """Name the axis, with ticks at round numbers, and mark each restart."""
        locator = MaxNLocator(5, steps=[1, 2, 3, 5, 6, 10])
        ticks = [tick for tick in locator.tick_values(0, self.total_s / self.unit_s) if tick >= 0]
        ticks = [tick for tick in ticks if tick * self.unit_s <= 1.001 * self.total_s]
        places = []
        for tick in ticks:
            life = max(i for i, b in enumerate(self.before_s) if b <= tick * self.unit_s + 1e-9)
            places.append(tick * self.unit_s + life * self.gap_s)
        ax.set_xticks(places, [f"{tick:g}" for tick in ticks])
        ax.set_xlim(0, self.total_s + (len(self.lives) - 1) * self.gap_s)
        for life in range(1, len(self.lives)):
            middle = self.place(life, 0) - self.gap_s / 2
            ax.axvline(middle, color=BLACK, linestyle=":", linewidth=1)
        label(ax, f"time ({self.unit})", "")


def binned(values: Sequence[float], size: int) -> list[float]:
    """Means of `size` neighbouring values."""
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def thinned(series: Series, num_points: int = MANY) -> tuple[list[float], list[float]]:
    """At most `num_points` points of a curve, each the mean of its neighbours."""
    size = max(1, -(-len(series) // num_points))
    xs = [x for x, _ in series]
    ys = [y for _, y in series]
    return binned(xs, size), binned(ys, size)


# ---- one row a device --------------------------------------------------------------------------


def draw_rows(
    ax: Axes,
    record: Record,
    rows: Sequence[tuple[Device, Series, str]],
    top: float,
    color_of: Callable[[Device], str],
) -> None:
    """Draw one row a device over time, filled up to its share of `top`, with words at its end."""
    clock = Clock(record.paid)
    room_in = ax.get_position().height * ax.figure.get_figheight() / max(1, len(rows))
    granted: dict[bool, list[Series]] = {True: [], False: []}  # with a rank, and without
    used: dict[str, list[Series]] = {}  # by colour
    for row, (device, series, words) in enumerate(rows):
        color = GREY if device.rank is None else color_of(device)
        for life, part in enumerate(split(series, record.lives)):
            begin, end = (clock.place(life, time_s) for time_s in record.paid[life])
            box = [(begin, row + 0.4), (begin, row - 0.4), (end, row - 0.4), (end, row + 0.4)]
            granted[device.rank is not None].append(box)
            if part:
                corners = [
                    (clock.place(life, time_s), row + 0.4 - 0.8 * min(1.0, value / (top or 1)))
                    for time_s, value in staircase(part, 2 * MANY)
                ]
                ends = [(corners[0][0], row + 0.4), *corners, (corners[-1][0], row + 0.4)]
                used.setdefault(color, []).append(ends)
        if room_in > DENSE_IN:
            look = {"fontsize": 7.5, "color": BLACK, "va": "center"}
            ax.text(1.01, row, words, transform=ax.get_yaxis_transform(), **look)
    grey = {"facecolor": LIGHT_GREY, "linewidth": 0}
    ax.add_collection(PolyCollection(granted[True], **grey), autolim=False)
    grey |= {"hatch": "///", "edgecolor": "white"}
    ax.add_collection(PolyCollection(granted[False], **grey), autolim=False)
    for color, polygons in used.items():
        ax.add_collection(PolyCollection(polygons, facecolor=color, linewidth=0), autolim=False)
    name_rows(ax, [device for device, *_ in rows], len(record.hosts), room_in)
    clock.label(ax)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def staircase(part: Series, num_points: int) -> Series:
    """The corners of a curve of steps: a sample tells of the time before it."""
    size = max(1, -(-len(part) // num_points))
    last_s = part[0][0] - SAMPLE_EVERY_S
    corners = []
    for first in range(0, len(part), size):
        some = part[first : first + size]
        value = fmean(value for _, value in some)
        time_s = some[-1][0]
        corners += [(last_s, value), (time_s, value)]
        last_s = time_s
    return corners


def name_rows(ax: Axes, devices: Sequence[Device], num_hosts: int, room_in: float) -> None:
    """Write the names of the devices beside their rows, and a line between two nodes."""
    names = {}
    for row, device in enumerate(devices):
        owner = "no rank" if device.rank is None else f"rank {device.rank}"
        name = owner if device.name == owner else f"{device.name}, {owner}"
        is_first = row == 0 or devices[row - 1].host != device.host
        if is_first and row:
            ax.axhline(row - 0.5, color=GREY, linewidth=0.6)
        if room_in < DENSE_IN:
            name = short(device.host) if num_hosts > 1 else name
        elif is_first and num_hosts > 1:
            name = f"{short(device.host)}  {name}"
        if is_first or room_in > DENSE_IN or num_hosts == 1 and row % 4 == 0:
            names[row] = name
    ax.set_yticks(list(names), names.values())
    ax.tick_params(axis="y", length=0, labelsize=8 if len(devices) > FEW else 9)
    ax.set_ylim(len(devices) - 0.4, -0.6)


def short(host: str) -> str:
    """A host's name without its domain and not too long; an address as it is."""
    name = host if host.replace(".", "").isdigit() else host.partition(".")[0]
    return name if len(name) <= 12 else f"{name[:5]}..{name[-5:]}"


def draw_busy(ax: Axes, record: Record) -> str:
    """Draw how busy every granted device was."""
    rows = [
        (device, device.busy, f"{mean_busy(device, record.paid):.0%}" if device.busy else "")
        for device in record.devices
    ]
    draw_rows(ax, record, rows, 1.0, lambda device: GREEN if device.is_gpu else BLUE)
    words = "A full row worked all the time; the number is the mean over time."
    words += " Grey was granted and left unused, as while the programs start."
    if any(device.rank is None for device in record.devices):
        words += " Hatched rows had no rank."
    return words + (" A dotted line is a restart." if len(record.lives) > 1 else "")


def draw_memory(ax: Axes, record: Record) -> str:
    """Draw the memory of every granted device."""
    devices = [device for device in record.devices if device.memory or device.is_gpu]
    most = [max((value for _, value in device.memory), default=0.0) for device in devices]
    known = max((device.full_bytes for device in devices if device.is_gpu), default=0.0)
    top = max([known, *most])
    rows = [
        (device, device.memory, scaled(used, "B") if used else "")
        for device, used in zip(devices, most, strict=True)
    ]
    draw_rows(ax, record, rows, top, lambda device: SKY)
    if not any(most):
        return "No memory was measured."
    full = f"all of a GPU's {scaled(top, 'B')}" if known else scaled(top, "B")
    return f"A full row is {full}; the number is the highest value of the row."


# ---- over the steps ----------------------------------------------------------------------------


def draw_loss(ax: Axes, record: Record) -> str:
    """Draw the loss of every step over the floor."""
    name, unit = loss_words(record)
    series = record.column("loss")
    x = [step for step, _ in series]
    y = [loss for _, loss in series]
    curves = {"training": (x, y)}
    status = record.status
    are_tasks = "noun" in record.about
    if record.valid:
        curves["validation"] = ([step for step, _ in record.valid], [v for _, v in record.valid])
    elif status.get("valid_loss") is not None and record.steps and not are_tasks:
        curves["validation"] = ([record.steps[-1]["step"]], [status["valid_loss"]])
    if status.get("test_loss") is not None:
        curves["test"] = ([status["test_step"]], [status["test_loss"]])
    floor = record.about.get("floor")
    lines(ax, curves, count_label(record), f"{name}\n({unit})" if unit else name, floor)
    lower_legend(ax)
    words = ""
    if are_tasks and y:
        count_axis(ax, record)
        ax.lines[0].set(linestyle="none", marker="o")  # tasks are no steps of one curve
        ax.set_ylim(0, 1.15 * max(y) or 1)
        words = f"Each point is one result: the first {y[0]:.3g}, the last {y[-1]:.3g}."
    if y and not are_tasks:
        words = f"Training: {y[0]:.3f} at step {x[0]}, {y[-1]:.3f} at step {x[-1]}."
    if status.get("test_loss") is not None:
        words += f" The validation loss was lowest at step {status['test_step']}, and the weights"
        words += " of that step were tested."
    broken = [line["step"] for line in record.steps if "loss" in line and line["loss"] is None]
    if broken:
        words += f" The {name} was not a finite number at step {broken[0]}."
    if floor is not None:
        words += f" No model can go below the dotted line at {floor:.3f}."
    return words.strip()


def draw_speed(ax: Axes, record: Record) -> str:
    """Draw the speed of every step."""
    series = record.column(f"{record.unit}_per_s")
    unit = f"{record.unit}/s"
    x, y = thinned(series)
    lines(ax, {unit: (x, y)}, count_label(record), unit)
    count_axis(ax, record)
    ax.set_ylim(0, 1.1 * max(y) or 1)
    ax.yaxis.set_major_formatter(EngFormatter(sep="") if max(y) >= 1e5 else "{x:,.0f}")
    typical = record.speed() or 0.0
    slowest = min(value for _, value in series)
    if "noun" in record.about:
        words = f"Typically {typical:,.0f} {unit} between two points, at least {slowest:,.0f}."
        return f"{words} A point counts what all ranks have done since the point before."
    return f"A typical step ran at {typical:,.0f} {unit}, the slowest at {slowest:,.0f}."


def phases(record: Record) -> dict[str, Series]:
    """The phases that were measured and took time."""
    found = {name: record.column(f"{name}_s") for name in PHASES}
    return {name: series for name, series in found.items() if sum(s for _, s in series) > 0}


def draw_split(ax: Axes, record: Record) -> str:
    """Draw where the time of a step went; what follows a step is in the words alone."""
    parts = {name: series for name, series in phases(record).items() if name != "validation"}
    size = -(-len(record.steps) // MANY)
    x = binned([line["step"] for line in record.steps], size)
    areas = {}
    for name in STEP_PHASES:
        if name in parts:
            areas[name] = binned(
                [1e3 * (line.get(f"{name}_s") or 0) for line in record.steps], size
            )
    stack(ax, x, areas, "step", "time of a step (ms)")
    look = {"fontsize": 9, "frameon": False, "ncols": 3, "columnspacing": 1, "handlelength": 1.6}
    ax.legend(loc="upper center", **look)
    lower_legend(ax)
    cut = cut_off(ax, x, [sum(at) for at in zip(*areas.values(), strict=True)])
    total_s = sum(s for series in parts.values() for _, s in series)
    shares = {name: sum(s for _, s in series) / total_s for name, series in parts.items()}
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    words = f"Of the time: {', '.join(f'{name} {share:.1%}' for name, share in ranked)}.{cut}"
    if "communication" in parts:
        words += " Communication is what was not hidden behind computation;"
        words += " other has the mean of the loss over the ranks and the writing of numbers."
    if len(record.ranks) > 1:
        words += " The time of messages that forward or backward themselves wait for is not split"
        words += " off: it counts as forward or backward."
    if valid_s := record.status.get("valid_s"):
        words += f" All steps took {duration(total_s)}, and all validation and test"
        words += f" {duration(valid_s)}."
    return words


def cut_off(ax: Axes, x: Sequence[float], heights: Sequence[float]) -> str:
    """End the axis above the usual steps, so that a slow one does not flatten them; say so."""
    usual = sorted(heights)[int(0.95 * (len(heights) - 1))]
    slow = [(height, at) for height, at in zip(heights, x, strict=True) if height > 2 * usual]
    if not slow:
        return ""
    ax.set_ylim(0, 1.3 * usual)
    height, at = max(slow)
    return f" The axis is cut off: the slowest, step {at:.0f}, took {height:,.0f} ms."


def lower_legend(ax: Axes) -> None:
    """Put the legend below the axis's name, however high the axes are."""
    if ax.get_legend():
        below = ScaledTranslation(0, -0.42, ax.figure.dpi_scale_trans)
        ax.get_legend().set_bbox_to_anchor((0.5, 0), transform=ax.transAxes + below)


# ---- all of them -------------------------------------------------------------------------------


def plan(record: Record) -> Mapping[str, tuple[str, Callable[[Axes, Record], str]]]:
    """Name, title and function of every figure for which the run has numbers already."""
    has_samples = bool(record.lives)
    wanted = {
        "devices": ("How busy each device was", draw_busy, has_samples),
        "memory": ("Memory of each device", draw_memory, has_samples),
        "speed": (f"Speed ({record.unit}/s)", draw_speed, record.unit is not None),
        "loss": (loss_words(record)[0].capitalize(), draw_loss, bool(record.column("loss"))),
        "split": ("Where the time of a step went", draw_split, bool(phases(record))),
    }
    return {name: (title, draw) for name, (title, draw, possible) in wanted.items() if possible}


def cards(record: Record) -> dict[str, Card]:
    """Draw every figure on its own."""
    rows_in = 0.8 + ROW_IN * max(5, len(record.devices))
    heights = {"devices": rows_in, "memory": rows_in, "split": 3.1}
    drawn = {}
    for name, (title, draw) in plan(record).items():
        figure, ax = new_figure(WIDTH_IN, heights.get(name, 2.6))
        words = draw(ax, record)
        drawn[name] = Card(title, words, png(figure, dpi=200))
    return drawn


def slide(record: Record, title: str, words: Sequence[str]) -> bytes:
    """All figures in one picture of 1600 x 900 pixels; the last of `words` is a warning."""
    few = [["devices", "speed", "loss"], ["memory", "split", "split"]]
    many = [["devices", "memory", name] for name in ("speed", "loss", "split")]
    figure = Figure(figsize=(12.8, 7.2), facecolor="white", layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 0.81), wspace=0.04)
    figure.text(0.02, 0.98, title, fontsize=18, color=BLACK, weight="bold", va="top")
    for number, line in enumerate(words):
        color = RED if number == len(words) - 1 else BLACK
        place = 0.93 - 0.037 * number
        figure.text(0.02, place, textwrap.shorten(line, 150), fontsize=12, color=color, va="top")
    planned = plan(record)
    mosaic = few if len(record.devices) <= FEW else many
    for name, ax in figure.subplot_mosaic(mosaic).items():
        house_style(ax)
        if name in planned:
            heading, draw = planned[name]
            draw(ax, record)
            ax.set_title(heading, loc="left", fontsize=11, color=BLACK)
        else:
            ax.set_axis_off()
    return palette(png(figure, dpi=125))


def palette(picture: bytes) -> bytes:
    """The same picture with 256 colours: a third of the bytes, also in a saved notebook."""
    buffer = io.BytesIO()
    found = Image.open(io.BytesIO(picture)).convert("RGB")
    found.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG")
    return buffer.getvalue()


def house_style(ax: Axes) -> None:
    """What `new_figure` does to its Axes."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=LIGHT_GREY, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=BLACK)
