"""The report tells the truth about a run, also about one that goes on, was killed, or is huge."""

import base64
import html
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report
from manyhands import figures
from manyhands.lab import run_ranks
from manyhands.run import TrainConfig
from manyhands.runtime import BadInput
from manyhands.storage import read_lines
from test_run import train

SCRIPT = Path(report.__file__)


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


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def samples(gpu: int | None, cpu: float = 1.0, count: int = 4) -> str:
    now = time.time()
    rows = [
        {"time_s": now + i / 2, "cpu": cpu, "gpu": gpu, "memory_bytes": 5e6} for i in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_page_of_a_finished_run(folder):
    page = page_of(folder)
    lines = read_lines(folder / "metrics.jsonl")
    assert page.rows["state"] == "finished" and page.rows["steps"] == "3 of 3"
    assert page.rows["ranks"] == "2 on 1 node" and page.rows["device"] == "2 x cpu"
    last = f"{lines[-1]['loss']:.4f} nats per token (floor 0.5000)"
    assert page.rows["last training loss"] == last
    assert page.rows["validation loss"] == "1.2500 nats per token (floor 0.5000)"
    speeds = sorted(line["tokens_per_s"] for line in lines)
    assert page.rows["speed"] == f"{speeds[1]:,.0f} tokens/s"
    assert page.rows["model FLOP/s"] == report.scaled(speeds[1] * 100, "FLOP/s")
    assert page.rows["data"] == "<b>&embedded" and ("b", {}) not in page.tags  # escaped
    assert page.rows["batch"] == "4"


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


def test_a_run_that_goes_on(folder):
    change(folder / "status.json", state="running", valid_loss=None, time_s=time.time())
    for path in [folder / "metrics.jsonl", *(folder / "ranks").iterdir()]:
        with open(path, "a") as file:
            file.write('{"step": 4, "lo')
    page = page_of(folder)
    assert page.rows["state"] == "running" and page.rows["steps"] == "3 of 3"
    assert "validation loss" not in page.rows


def test_a_killed_run_is_not_called_running(folder):
    change(folder / "status.json", state="running", time_s=0)
    for path in (folder / "ranks").iterdir():
        path.write_text("")
    assert "probably killed" in page_of(folder).rows["state"]


def test_a_run_before_its_first_step(folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "status.json").unlink()
    for path in (folder / "ranks").iterdir():
        path.unlink()
    page = page_of(folder)
    assert page.rows["state"] == "not started" and page.rows["steps"] == "0 of 3"
    assert not [tag for tag, _ in page.tags if tag == "img"]


def test_idle_ranks_and_idle_gpus_are_named(folder):
    machine = {"host": "n1", "device": "cuda:0", "num_gpus": 4, "num_cores": 8}
    ranks = [{**machine, "device": f"cuda:{rank}"} for rank in range(3)]
    change(folder / "config.json", ranks=ranks)
    for rank, gpu in enumerate([90, 3]):
        (folder / "ranks" / f"rank-{rank:05d}.jsonl").write_text(samples(gpu))
    words = page_of(folder).text
    assert "Rank 1 was idle: 3% busy on average." in words
    assert "Rank 2 wrote no samples." in words
    assert "1 of the 4 GPUs granted on n1 had no rank." in words
    assert "Rank 0 was idle" not in words and "No rank was idle" not in words


def test_64_ranks(folder):
    ranks = [
        {"host": f"n{rank // 4}", "device": f"cuda:{rank % 4}", "num_gpus": 4, "num_cores": 8}
        for rank in range(64)
    ]
    change(folder / "config.json", ranks=ranks)
    for rank in range(64):
        (folder / "ranks" / f"rank-{rank:05d}.jsonl").write_text(samples(0 if rank > 50 else 80))
    page = page_of(folder)
    assert page.rows["ranks"] == "64 on 16 nodes"
    assert "Rank 51 was idle: 0% busy on average." in page.text
    assert "8 more ranks likewise" in page.text and "GPUs granted" not in page.text


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

    source = "from manyhands import figures\nfigures.show(figures.new_figure()[0], 'a card')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": tmp_path}}).execute()
    (output,) = notebook.cells[0].outputs
    assert output.metadata["image/png"]["alt"] == "a card"
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
