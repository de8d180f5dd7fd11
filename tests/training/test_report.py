"""The report tells the truth about a run, also about one that goes on, was killed, or is huge."""

import base64
import html
import json
import re
import socket
import struct
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from manyhands.instruments import figures
from manyhands.instruments.meters import PHASES
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks
from manyhands.training import report, report_figures
from manyhands.training.process import this_process
from manyhands.training.record import read
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import read_lines
from small_run import train

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "report.py"


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and its table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        cells = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', text)
        # The summary stands above the settings, and has the last word here.
        self.rows = {html.unescape(name): html.unescape(value) for name, value in cells[::-1]}

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> Page:
    return Page(report.write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A real run of 3 steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "tiny-001"
    config = TrainConfig(batch=4, steps=3, out=str(folder), data="<b>&embedded")
    run_ranks(train, 2, config, quiet=True)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of it, to be changed."""
    copy = tmp_path / "tiny-001"
    for path in finished.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl"):
            target = copy / path.relative_to(finished)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def rows_of(folder: Path) -> dict[str, str]:
    """The rows of the job's table, without drawing anything."""
    return {name: str(row) for name, row in report.summary(read(folder)).items()}


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def samples(gpu: int | None, cpu: float = 1.0, count: int = 4, begin_s: float = 1e9) -> list[dict]:
    """A rank's samples, twice a second."""
    values = {"cpu": cpu, "gpu": gpu, "memory_bytes": 5e6}
    return [{"time_s": begin_s + (i + 1) / 2, **values} for i in range(count)]


def make_gpu_run(folder: Path, nodes: int, per_node: int, used: int, count: int = 4) -> None:
    """Turn a run into one on GPUs: `used` of the `per_node` granted ones have a rank, 80% busy."""
    machine = {"num_gpus": per_node, "num_cores": 8, "num_threads": 8, "memory_bytes": 80e9}
    machine["name"] = "Graphics & Co 100"
    hosts = [f"node{n}" for n in range(nodes)]
    ranks = [machine | {"host": h, "device": f"cuda:{g}"} for h in hosts for g in range(used)]
    times = {"time_limit_s": 20.0, "restarts": 0, "starts_s": [1e9 - 2]}
    names = {"scheduler": "slurm", "id": "17", "name": "<i>", "partition": "gpu", "nodes": hosts}
    change(folder / "config.json", ranks=ranks, job=names | times)
    change(folder / "status.json", time_s=1e9 + count / 2)
    for path in [*(folder / "ranks").iterdir(), *(folder / "nodes").iterdir()]:
        path.unlink()
    for rank in range(len(ranks)):
        write_rows(folder / "ranks" / f"rank-{rank:05d}.jsonl", samples(80, count=count))
    for host in hosts:
        gpus = [{"percent": 80, "memory_bytes": 40e9, "power_w": 500}] * used
        gpus += [{"percent": 0, "memory_bytes": 1e9, "power_w": 100}] * (per_node - used)
        rows = [row | {"gpus": gpus} for row in samples(None, count=count)]
        write_rows(folder / "nodes" / f"{host}.jsonl", rows)


def test_page_of_a_finished_run(folder):
    page = page_of(folder)
    lines = read_lines(folder / "metrics.jsonl")
    assert page.rows["state"] == "finished" and page.rows["steps"] == "3 of 3"
    assert page.rows["ranks"] == "2 ranks on 1 node" and page.rows["used"] == "2 CPU threads"
    assert page.rows["nodes"] == socket.gethostname()
    assert page.rows["restarts"] == "none" and page.rows["scheduler"] == "none: started by hand"
    last = f"{lines[-1]['loss']:.4f} nats per token, floor 0.5000"
    assert page.rows["last training loss"] == last
    assert page.rows["validation loss"] == "1.2500 nats per token, floor 0.5000"
    speeds = sorted(line["tokens_per_s"] for line in lines)
    assert page.rows["speed"] == f"{speeds[1]:,.0f} tokens/s"
    assert page.rows["model FLOP/s"] == report.scaled(speeds[1] * 100, "FLOP/s")
    assert page.rows["data"] == "<b>&embedded" and ("b", {}) not in page.tags  # escaped
    assert page.rows["batch"] == "4"
    assert "core-hours" in page.rows["busy"] and "energy" not in page.rows


def test_page_needs_nothing_else_and_every_figure_has_words(folder):
    page = page_of(folder)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 5
    for image in images:
        assert len(image["alt"]) > 20
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    beside = {path.read_bytes() for path in folder.glob("report-*.png")}
    assert beside == {base64.b64decode(image["src"].partition(",")[2]) for image in images}
    sources = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href")]
    assert all(source.startswith("data:") for source in sources)
    text = (folder / "report.html").read_text()
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme" in text
    assert "<script" not in text and len(text) < 1_500_000


def test_slide_has_the_size_of_a_slide(folder):
    make_gpu_run(folder, nodes=16, per_node=4, used=4)
    report.write_report(folder)
    head = (folder / "report.png").read_bytes()[:24]
    assert struct.unpack(">II", head[16:]) == (1600, 900)


def test_a_run_that_goes_on(folder):
    alive = {"time_s": time.time(), "process": this_process()}
    change(folder / "status.json", state="running", valid_loss=None, **alive)
    for path in [folder / "metrics.jsonl", *(folder / "ranks").iterdir()]:
        with open(path, "a") as file:
            file.write('{"step": 4, "lo')
    page = page_of(folder)
    assert page.rows["state"] == "running" and page.rows["steps"] == "3 of 3"
    assert "validation loss" not in page.rows


def silence(folder: Path) -> None:
    for path in [*(folder / "ranks").iterdir(), *(folder / "nodes").iterdir()]:
        path.write_text("")


def test_a_killed_run_is_not_called_running(folder):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = this_process() | {"pid": gone.pid}
    change(folder / "status.json", state="running", time_s=time.time(), process=process)
    page = page_of(folder)
    assert page.rows["state"] == f"ended without a word, its process {gone.pid} is gone"
    assert ("dd", {"class": "ended-but"}) in page.tags


def test_a_run_whose_process_cannot_be_seen_is_told_by_its_silence(folder):
    change(folder / "status.json", state="running", time_s=0, process={"host": "node9"})
    silence(folder)
    page = page_of(folder)
    assert page.rows["state"].endswith("whether it still runs cannot be seen from here")
    assert ("dd", {"class": "running-but"}) in page.tags
    change(folder / "status.json", process=this_process())
    assert re.fullmatch(r"running, but silent for \d+ h \d+ min", rows_of(folder)["state"])


def test_the_time_of_the_validation_is_told(folder):
    assert "validation and test" not in rows_of(folder)  # this run had none
    status = json.loads((folder / "status.json").read_text())
    about = json.loads((folder / "config.json").read_text())
    begin_s = about["job"]["starts_s"][0]
    change(folder / "status.json", valid_s=3.0, time_s=max(begin_s + 12.0, status["time_s"]))
    used_s = max(12.0, status["time_s"] - begin_s)
    page = page_of(folder)
    share = re.fullmatch(r"3.0 s, (\d+)% of the time used", page.rows["validation and test"])
    assert abs(int(share[1]) - 300 / used_s) < 1.5
    assert "and all validation and test 3.0 s." in page.text


def test_a_failed_run(folder):
    change(folder / "status.json", state="failed", valid_loss=None)
    page = page_of(folder)
    assert page.rows["state"] == "failed" and ("dd", {"class": "failed"}) in page.tags


def test_a_run_before_its_first_step(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "status.json").unlink()
    for path in [*(folder / "ranks").iterdir(), *(folder / "nodes").iterdir()]:
        path.unlink()
    page = page_of(folder)
    assert page.rows["state"] == "not started" and page.rows["steps"] == "0 of 3"
    assert not [tag for tag, _ in page.tags if tag == "img"]


def test_a_run_on_images_without_phases_and_without_a_job(folder):
    """As a job writes that has a loop of its own, or one of before there were all these fields."""
    about = json.loads((folder / "config.json").read_text())
    for name in ("job", "flops_per_token", "tokens_per_step"):
        del about[name]
    about |= {"loss_name": "error", "loss_unit": "share of <images>"}
    for rank in about["ranks"]:
        del rank["num_threads"], rank["memory_bytes"]
    (folder / "config.json").write_text(json.dumps(about))
    kept = [{"step": n, "loss": 0.5 / n, "images_per_s": 1000.0 * n} for n in (1, 2, 3)]
    write_rows(folder / "metrics.jsonl", kept)
    for path in (folder / "nodes").iterdir():
        path.unlink()
    page = page_of(folder)
    assert page.rows["speed"] == "2,000 images/s" and "model FLOP/s" not in page.rows
    assert page.rows["last training error"].startswith("0.1667 share of <images>")
    titles = [attrs["alt"].partition(".")[0] for tag, attrs in page.tags if tag == "img"]
    assert titles == [
        "How busy each device was",
        "Memory of each device",
        "Speed (images/s)",
        "Error",
    ]
    assert "nats" not in page.text


# ---- devices, time and what it cost ------------------------------------------------------------


def test_granted_gpus_without_a_rank_are_named_and_drawn(folder):
    make_gpu_run(folder, nodes=1, per_node=4, used=1)
    page = page_of(folder)
    assert (
        "3 of the 4 GPUs granted on node0 have no rank: start 4 ranks (RANKS=4) or ask for 1."
        in page.text
    )
    assert page.rows["granted"] == "4 GPUs (Graphics & Co 100), 8 cores"
    assert page.rows["used"] == "1 GPU"
    assert page.rows["scheduler"] == "<i>, Slurm job 17, partition gpu"
    record = read(folder)
    figure, ax = figures.new_figure()
    report_figures.draw_busy(ax, record)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["GPU 0, rank 0", "GPU 1, no rank", "GPU 2, no rank", "GPU 3, no rank"]
    assert [text.get_text() for text in ax.texts] == ["40%", "0%", "0%", "0%"]  # as the tile says
    hatched = [area for area in ax.collections if area.get_hatch()]
    assert len(hatched) == 1 and len(hatched[0].get_paths()) == 3


def test_hours_and_energy_are_sums_over_time(folder):
    make_gpu_run(folder, nodes=1, per_node=4, used=1, count=7200)  # an hour
    bill = read(folder).bill
    assert (bill.unit, bill.num_granted, bill.num_told) == ("GPU", 4, 4)
    assert bill.charged_h == pytest.approx(4 * (3600 + 2) / 3600)  # also before the first sample
    assert bill.busy_h == pytest.approx(0.8)
    assert bill.energy_kwh == pytest.approx(0.5 + 3 * 0.1)
    rows = rows_of(folder)
    assert rows["busy"] == "20%, 0.8 of 4 GPU-hours"
    assert rows["charged by most centres"] == "4 GPU-hours"
    assert rows["energy"] == "0.8 kWh"


def test_core_hours_of_a_run_on_cpus(folder):
    machine = {"host": "n1", "device": "cpu", "num_gpus": 0, "num_cores": 8, "num_threads": 2}
    change(folder / "config.json", ranks=[machine], job={})
    change(folder / "status.json", time_s=1e9)
    write_rows(folder / "ranks" / "rank-00000.jsonl", samples(None, cpu=1.5, count=7200))
    for path in (folder / "nodes").iterdir():
        path.unlink()
    record = read(folder)
    assert record.bill.unit == "core" and record.bill.charged_h == pytest.approx(8)
    assert record.bill.busy_h == pytest.approx(1.5)
    assert [(d.name, d.rank, d.num_cores) for d in record.devices] == [
        ("rank 0", 0, 2),
        ("6 cores", None, 6),
    ]
    (words,) = report.idle_lines(record)
    assert words.startswith("6 of the 8 cores granted on n1 have no rank")
    assert rows_of(folder)["granted"] == "8 cores"


def test_the_time_asked_is_compared_with_one_life(folder):
    make_gpu_run(folder, nodes=1, per_node=1, used=1, count=16)
    assert rows_of(folder)["time used"] == "10.0 s, 50% of the 20.0 s asked"


def test_a_gap_between_two_lives_is_no_time_of_the_run(folder):
    make_gpu_run(folder, nodes=1, per_node=1, used=1, count=20)
    again = samples(80, count=40, begin_s=1e9 + 7200)
    for path in (folder / "ranks").iterdir():
        write_rows(path, samples(80, count=20) + again)
    (folder / "nodes" / "node0.jsonl").unlink()
    job = {"restarts": 1, "starts_s": [1e9 - 2, 1e9 + 7199]}
    change(folder / "config.json", job=job)
    change(folder / "status.json", time_s=1e9 + 7220)
    record = read(folder)
    assert record.lives == [(1e9, 1e9 + 10), (1e9 + 7200, 1e9 + 7220)]
    assert record.paid == [(1e9 - 2, 1e9 + 10), (1e9 + 7199, 1e9 + 7220)]
    assert record.bill.charged_h * 3600 == pytest.approx(12 + 21)
    assert record.bill.busy_h * 3600 == pytest.approx(0.8 * 30)
    rows = rows_of(folder)
    assert rows["restarts"] == "restarted once; nothing ran for 2 h 0 min in between"
    assert rows["time used"] == "21.0 s, 33.0 s with the lives before it"
    figure, ax = figures.new_figure()
    assert "A dotted line is a restart." in report_figures.draw_busy(ax, record)
    first, second = (path.get_extents() for path in ax.collections[0].get_paths())
    assert (first.x0, first.x1) == pytest.approx((0, 12))
    assert second.x0 > 12 and second.x1 - second.x0 == pytest.approx(21)
    assert ax.get_xlim()[1] == pytest.approx(second.x1)


def test_a_new_life_is_told_by_its_start_or_by_silence(folder):
    machine = {"host": "n1", "device": "cpu", "num_gpus": 0, "num_cores": 1, "num_threads": 1}
    for path in (folder / "nodes").iterdir():
        path.unlink()
    cases = [(4, [1e9 - 1], 1), (4, [1e9 - 1, 1e9 + 3.5], 2), (20, [], 2)]
    for pause_s, starts_s, num_lives in cases:
        rows = samples(None, count=4) + samples(None, count=4, begin_s=1e9 + pause_s)
        write_rows(folder / "ranks" / "rank-00000.jsonl", rows)
        change(folder / "config.json", ranks=[machine], job={"starts_s": starts_s})
        assert len(read(folder).lives) == num_lives


def test_a_life_on_another_node_is_told_by_the_rank(folder):
    make_gpu_run(folder, nodes=1, per_node=1, used=1, count=4)
    earlier = samples(30, count=4, begin_s=1e9 - 100)
    write_rows(folder / "ranks" / "rank-00000.jsonl", earlier + samples(80, count=4))
    (device,) = read(folder).devices
    assert [value for _, value in device.busy] == pytest.approx([0.3] * 4 + [0.8] * 4)


def test_a_gpu_that_nvml_cannot_measure_is_not_called_idle(folder):
    make_gpu_run(folder, nodes=1, per_node=2, used=2)
    nothing = {"percent": None, "memory_bytes": None, "power_w": None, "why": "Not Supported <x>"}
    write_rows(
        folder / "nodes" / "node0.jsonl", [row | {"gpus": [nothing] * 2} for row in samples(None)]
    )
    for path in (folder / "ranks").iterdir():
        write_rows(path, samples(None))
    rows = rows_of(folder)
    assert rows["busy"] == "not measured, of 0.0022 GPU-hours"
    assert rows["energy"] == "not known, Not Supported <x>"
    assert report.idle_lines(read(folder)) == []


def test_granted_gpus_that_no_rank_can_use(folder):
    """Ranks on the CPU beside granted GPUs: rows for both, and nothing charged is busy."""
    make_gpu_run(folder, nodes=1, per_node=2, used=1)
    machine = {"host": "node0", "device": "cpu", "num_gpus": 2, "num_cores": 4, "num_threads": 1}
    change(folder / "config.json", ranks=[machine])
    write_rows(folder / "ranks" / "rank-00000.jsonl", samples(None, cpu=0.9))
    record = read(folder)
    assert [(device.name, device.rank) for device in record.devices] == [
        ("GPU 0", None),
        ("GPU 1", None),
        ("rank 0", 0),
    ]
    assert "train on GPUs or ask for none" in report.idle_lines(record)[0]


def test_idle_ranks_are_named(folder):
    make_gpu_run(folder, nodes=1, per_node=4, used=3)
    (folder / "nodes" / "node0.jsonl").unlink()  # as a run writes that has no such file
    for rank, gpu in enumerate([90, 3]):
        write_rows(folder / "ranks" / f"rank-{rank:05d}.jsonl", samples(gpu))
    (folder / "ranks" / "rank-00002.jsonl").unlink()
    words = " ".join(report.idle_lines(read(folder)))
    assert "Rank 1 was idle: 2% busy on average." in words
    assert "Rank 2 wrote no samples." in words
    assert "1 of the 4 GPUs granted on node0 has no rank" in words
    assert "Rank 0 was idle" not in words


def test_64_ranks_on_16_nodes(folder):
    make_gpu_run(folder, nodes=16, per_node=4, used=4)
    for rank in range(51, 64):
        write_rows(folder / "ranks" / f"rank-{rank:05d}.jsonl", samples(0))
    for path in (folder / "nodes").iterdir():
        path.unlink()
    assert rows_of(folder)["ranks"] == "64 ranks on 16 nodes"
    words = report.idle_lines(read(folder))
    assert words[0] == "Rank 51 was idle: 0% busy on average." and len(words) == 6
    assert words[-1] == "8 more ranks likewise."
    figure, ax = figures.new_figure(3.8, 0.8 + 0.2 * 64)
    report_figures.draw_busy(ax, read(folder))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert len(names) == 64 and names[4] == "node1  GPU 0, rank 4" and names[5] == "GPU 1, rank 5"
    figure, ax = figures.new_figure(3.8, 4)  # no room for a name a row
    report_figures.draw_busy(ax, read(folder))
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"node{n}" for n in range(16)]


def test_the_split_names_its_phases_and_leaves_out_what_took_no_time(folder):
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines:
        line |= {f"{phase}_s": 0.0 for phase in PHASES}
        line |= {"forward_s": 0.02, "communication_s": 0.06, "checkpoint_s": 0.02}
        line |= {"validation_s": 5.0}
    write_rows(folder / "metrics.jsonl", lines)
    figure, ax = figures.new_figure()
    words = report_figures.draw_split(ax, read(folder))
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["forward", "communication"]  # the others follow a step
    assert words.startswith("Of the time: communication 60.0%, forward 20.0%, checkpoint 20.0%.")
    colors = [tuple(area.get_facecolor()[0]) for area in ax.collections]
    assert len(set(colors)) == 2


def test_several_ranks_are_told_which_messages_are_not_split_off(folder):
    lines = read_lines(folder / "metrics.jsonl")
    none = {f"{phase}_s": 0.0 for phase in PHASES} | {"forward_s": 0.02}
    write_rows(folder / "metrics.jsonl", [line | none for line in lines])
    told = "messages that forward or backward themselves wait for is not split off"
    words = {}
    for num_ranks in (1, 2):
        about = json.loads((folder / "config.json").read_text())
        about["ranks"] = [about["ranks"][0]] * num_ranks
        (folder / "config.json").write_text(json.dumps(about))
        words[num_ranks] = report_figures.draw_split(figures.new_figure()[1], read(folder))
    assert told not in words[1] and told in words[2]


def test_one_slow_step_does_not_flatten_the_others(folder):
    first = read_lines(folder / "metrics.jsonl")[0]
    nothing = {f"{phase}_s": 0.0 for phase in PHASES}
    lines = [first | nothing | {"step": i + 1, "forward_s": 0.02} for i in range(30)]
    lines[0]["forward_s"] = 1.6
    write_rows(folder / "metrics.jsonl", lines)
    figure, ax = figures.new_figure()
    words = report_figures.draw_split(ax, read(folder))
    assert ax.get_ylim()[1] == pytest.approx(1.3 * 20)
    assert "The axis is cut off: the slowest, step 1, took 1,600 ms." in words


def test_every_validation_and_the_test_are_told(folder):
    write_rows(folder / "valid.jsonl", [{"step": s, "valid_loss": 3 - s} for s in (1, 2)])
    change(
        folder / "status.json", valid_loss=1.0, test_loss=1.25, test_step=2, test_words="two words"
    )
    rows = rows_of(folder)
    assert rows["validation loss"].startswith("1.0000 nats per token")
    assert rows["test loss"] == "1.2500 nats per token, two words, from step 2"
    tile = report.tiles(read(folder))["test loss"]
    assert (tile.written[0], tile.small) == ("1.2500", "nats per token, two words, from step 2")
    figure, ax = figures.new_figure()
    assert "lowest at step 2" in report_figures.draw_loss(ax, read(folder))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["training", "validation", "test", "floor"]
    assert list(ax.lines[1].get_ydata()) == [2, 1]


def test_one_name_a_device_and_short_hosts():
    assert report_figures.short("gpu001.cluster.example") == "gpu001"
    assert report_figures.short("127.0.77.1") == "127.0.77.1"
    assert len(report_figures.short("a-very-long-name-of-a-node")) <= 12


def test_loss_that_is_not_a_number(folder):
    lines = read_lines(folder / "metrics.jsonl")
    lines[1]["loss"] = None
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "not a finite number at step 2" in page_of(folder).text


@pytest.mark.parametrize("spoil", ["no folder", "empty folder", "other json", "broken json"])
def test_what_is_no_run_is_refused(tmp_path, spoil):
    folder = tmp_path / "x"
    if spoil != "no folder":
        folder.mkdir()
    if spoil == "other json":
        (folder / "config.json").write_text("{}")
    if spoil == "broken json":
        (folder / "config.json").write_text("{")
    with pytest.raises(BadInput) as error:
        report.write_report(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert not folder.exists() or not list(folder.glob("report*"))


def test_command_line(folder):
    def start(path: Path) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)

    done = start(folder)
    assert done.returncode == 0 and f"report: {folder / 'report.html'}" in done.stdout
    refused = start(folder / "nowhere")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1


def test_timeline_draws_each_span_in_its_row_and_colour():
    figure, ax = figures.new_figure()
    spans = [(0, "forward 1", 2.0, 2.5), (1, "communication", 2.5, 2.6)]
    figures.timeline(ax, spans)
    first, second = ax.patches
    assert (first.get_x(), first.get_width()) == pytest.approx((0, 500))
    assert (second.get_x(), second.get_width()) == pytest.approx((500, 100))
    assert first.get_y() < second.get_y() and ax.yaxis_inverted()
    assert first.get_facecolor() != second.get_facecolor()
    assert first.get_hatch() != second.get_hatch()  # not by colour alone
    assert [text.get_text() for text in ax.texts] == ["1"]
    assert figures.png(figure).startswith(b"\x89PNG")


def test_bars_and_show_outside_a_notebook(capsys):
    figure, ax = figures.new_figure()
    figures.bars(ax, {"predicted": [1.0, 2.0], "measured": [1.5, 2.5]}, ["a", "b"], "bytes")
    assert [bar.get_height() for bar in ax.patches] == [1.0, 2.0, 1.5, 2.5]
    figures.show(figure, "predicted and measured bytes")
    assert capsys.readouterr().out == "figure: predicted and measured bytes\n"


def test_show_in_a_notebook_carries_the_words(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat comes with jupyterlab")
    from nbclient import NotebookClient

    source = (
        "from manyhands.instruments import figures\nfigures.show(figures.new_figure()[0], 'a card')"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": tmp_path}}).execute()
    (output,) = notebook.cells[0].outputs
    assert output.metadata["image/png"]["alt"] == "a card"
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
