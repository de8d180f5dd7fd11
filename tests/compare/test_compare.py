"""All ways side by side: equal losses, memory and messages as their formulas say, and the job."""

import json
import re

import pytest
import torch

import runs
import train_compare
from commands import write_text
from manyhands.compare import figures, planned
from manyhands.compare.measure import PARTS, compare
from manyhands.fsdp import fully_shard
from manyhands.instruments.figures import png
from manyhands.models.transformer import num_parameters
from manyhands.ranks.failures import BadInput, RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.tensor import model as split_model
from manyhands.ways.ready import Ready, Setting, adamw, backward_of, one_process, own_samples
from manyhands.ways.registry import ON_A_MESH, WAYS, ways_for

SETTINGS = {
    2: Setting(layers=2, vocab=40, block=8, batch=8, micro_batches=4),
    3: Setting(layers=3, vocab=42, block=9, batch=12, micro_batches=4),
    4: Setting(layers=4, vocab=40, block=8, batch=16, micro_batches=4),
}


@pytest.fixture(scope="module", params=SETTINGS)
def found(request):
    results = run_ranks(compare, request.param, SETTINGS[request.param], 2, timeout_s=100)
    assert all(result == results[0] for result in results)
    return results[0]


def sizes(found):
    """Bytes of the model's parameters, the setting, and the number of ranks."""
    setting = SETTINGS[found["ranks"]]
    count = num_parameters(setting.vocab, setting.block, setting.layers)
    return 4 * count, setting, found["ranks"]


def test_every_way_trains_as_one_process_does(found):
    assert list(found["ways"]) == list(ways_for(found["ranks"]))
    for name, one in found["ways"].items():
        assert len(one["losses"]) == 5 and one["difference"] < 1e-5, name
    assert found["ways"]["one process"]["losses"][0] == pytest.approx(3.7, abs=0.2)  # ln 40 to 42


def test_memory_is_what_lesson_09_predicts(found):
    whole, setting, n = sizes(found)
    ways = found["ways"]
    for name in ("one process", "DDP"):
        parts = ways[name]["parts"]
        assert (parts["weights"], parts["gradients"], parts["gathered"]) == (whole, whole, 0)
        assert parts["optimizer"] == pytest.approx(2 * whole, abs=4 * 100)  # and its counters
    # Padding, which makes every Flat a multiple of n, is a few numbers.
    assert ways["ZeRO-1"]["parts"]["weights"] == pytest.approx(whole, rel=0.01)
    for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "fully_shard"):
        assert ways[name]["parts"]["optimizer"] == pytest.approx(2 * whole / n, rel=0.01), name
    assert ways["ZeRO-1"]["parts"]["gradients"] >= whole
    assert ways["ZeRO-2"]["parts"]["gradients"] < whole
    for name in ("ZeRO-3", "fully_shard"):
        parts = ways[name]["parts"]
        assert parts["weights"] == pytest.approx(whole / n, rel=0.03), name
        assert 0 < parts["gathered"] <= whole * (n - 1) / n + whole / setting.layers
    assert whole / n < ways["tensor"]["parts"]["weights"] < 1.2 * whole / n  # norms are whole
    kept = {name: one["parts"]["activations"] for name, one in ways.items()}
    for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "fully_shard"):
        assert kept[name] == pytest.approx(kept["one process"] / n, rel=0.01), name
    assert kept["pipeline (1F1B)"] < kept["tensor + sequence"] < kept["tensor"]
    for name, one in ways.items():
        assert one["peak"] in one["peaks"] and len(one["peaks"]) == (
            1 if name == "one process" else n
        )
        lowest = one["parts"]["weights"] + one["parts"]["optimizer"] + one["parts"]["activations"]
        assert one["peak"] >= lowest, name


def test_messages_are_those_of_the_formulas(found):
    whole, setting, n = sizes(found)
    ways = found["ways"]
    share = (n - 1) / n
    assert ways["one process"]["sent"] == {}
    assert ways["DDP"]["sent"] == {"all_reduce": int(2 * share * whole)}
    for name, times in (("ZeRO-1", 2), ("ZeRO-2", 2), ("ZeRO-3", 3), ("fully_shard", 3)):
        sent = sum(ways[name]["sent"].values())
        # The root unit is gathered once only.
        root = share * 4 * (setting.vocab + setting.block + 1) * 32 * setting.layers
        wanted = times * share * whole - (root if times == 3 else 0)
        assert sent == pytest.approx(wanted, rel=0.02), name
        more = ways[name]["sent_by_gloo"] - sent
        assert more == pytest.approx(share * whole, rel=0.02), name  # the reduce-scatters again
    assert ways["tensor"]["calls"]["all_reduce"] == 2 + 2 * (2 * setting.layers + 1)
    assert ways["tensor"]["calls"] == {
        name: calls for name, calls in split_model.calls_per_step(setting.layers).items() if calls
    }
    shape = (setting.batch, setting.block, 32 * setting.layers)
    cut = 4 * torch.Size(shape).numel()  # all activations of a cut, or all their gradients
    tied = 4 * setting.vocab * shape[-1]
    assert ways["pipeline (1F1B)"]["sent"]["send"] in {cut + tied, 2 * cut, 2 * cut + tied}


def test_the_ledger_counts_as_many_calls_as_fully_shard_s_formula(found):
    wanted = fully_shard.calls_per_step(SETTINGS[found["ranks"]].layers)
    calls = {name: count for name, count in wanted.items() if count}
    assert found["ways"]["fully_shard"]["calls"] == found["ways"]["ZeRO-3"]["calls"] == calls


def test_the_table_and_the_figure_hold_every_way(found):
    lines = figures.table(found | {"is_busy": True}).splitlines()
    assert [line.split("  ")[0] for line in lines[2:-2]] == list(found["ways"])
    assert all(part in lines[0] for part in PARTS) and figures.BUSY == lines[-1]
    assert figures.BUSY not in figures.table(found | {"is_busy": False})
    figure = figures.draw(found)
    assert [ax.get_xlabel() for ax in figure.axes] == [
        "memory of a rank (MB)",
        "sent by a rank in a step (MB)",
        "time of a step (ms)",
    ]
    assert "more by gloo" in figure.axes[1].get_legend_handles_labels()[1]
    labels = figures.draw(found | {"backend": "nccl"}).axes[1].get_legend_handles_labels()[1]
    assert "more by gloo" not in labels
    assert png(figure).startswith(b"\x89PNG")
    assert all(name in figures.in_words(found) for name in found["ways"])


def test_meshes_are_compared_on_an_even_number_of_four_ranks_or_more():
    for ranks in (1, 2, 3, 5, 7):
        assert list(ways_for(ranks)) == list(WAYS)
    for ranks in (4, 6, 8):
        assert list(ways_for(ranks)) == [*WAYS, *ON_A_MESH]
    assert list(train_compare.choose_ways(" x ", 4)) == ["one process", *ON_A_MESH]
    with pytest.raises(BadInput, match=r"--only ' x ' is in no name on 2 rank\(s\): DDP"):
        train_compare.choose_ways(" x ", 2)


@pytest.mark.parametrize("found", [4], indirect=True)
def test_a_mesh_keeps_and_sends_as_its_two_techniques_do(found):
    """On 4 ranks as 2 x 2: half of what is cut over tp, and a quarter after the shards."""
    whole, setting, n = sizes(found)
    both, pipeline = found["ways"]["FSDP x TP"], found["ways"]["PP x DP"]
    assert whole / 4 < both["parts"]["weights"] < 1.1 * whole / 4  # norms, positions: whole over tp
    assert both["parts"]["optimizer"] == pytest.approx(2 * both["parts"]["weights"], rel=0.01)
    # Each of two shares of the samples is half of them, and each rank has half of the heads.
    kept = found["ways"]["one process"]["parts"]["activations"]
    assert kept / 4 < both["parts"]["activations"] < kept / 2
    assert set(both["sent"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    shape = (setting.batch // 2, setting.block, 32 * setting.layers)
    activations = 4 * torch.Size(shape).numel()
    summed = split_model.calls_per_step(setting.layers)["all_reduce"] - 2
    losses = 3 * 4 * setting.batch // 2 * setting.block + 4  # and the mean over dp
    assert both["sent"]["all_reduce"] == pytest.approx(summed * activations + losses, abs=1)
    tied = 4 * setting.vocab * shape[-1]
    assert pipeline["sent"]["send"] in {activations, activations + tied}
    assert whole / 2 < pipeline["parts"]["weights"] < 0.6 * whole


def test_the_planner_knows_the_states_of_every_way_that_cuts_them_alike(found):
    _, setting, n = sizes(found)
    plans = planned.beside(found, planned.training_of(setting, n, 1e9, 1e9))
    assert set(found["ways"]) - set(plans) == {"one process", "ZeRO-1", "ZeRO-2"}
    for name, (plan, peak, step_s) in plans.items():
        one = found["ways"][name]
        assert (peak, step_s) == (one["peak"], one["median_s"])
        states = sum(plan.memory[part] for part in ("weights", "gradients", "optimizer"))
        # 16 bytes a parameter, of which 4 are the weight; the planner leaves positions out
        assert states / 4 == pytest.approx(one["parts"]["weights"], rel=0.12), name
        assert plan.memory["activations"] < one["parts"]["activations"], name


def no_averaging(model, setting):
    """Each rank trains on its own samples and tells nobody."""
    optimizer = adamw(model.parameters())
    return Ready(model, optimizer, backward_of(model), own_samples)


def test_a_way_that_trains_otherwise_is_refused():
    ways = {"one process": one_process, "nobody asks": no_averaging}
    with pytest.raises(RankFailed) as failed:
        run_ranks(compare, 2, SETTINGS[2], 1, ways=ways, quiet=True)
    assert failed.value.failure.error == "AssertionError"
    assert failed.value.failure.message.startswith("nobody asks: losses [")


REFUSED = [
    ({"batch": 9}, "--batch 9 is shared by 2 rank(s) and cut into 4 micro-batches: take a mult"),
    ({"micro_batches": 3}, "--batch 8 is shared by 2 rank(s) and cut into 3 micro-batches"),
    ({"layers": 1}, "1 heads cannot be shared by 2 ranks: take --layers 2"),
    ({"block": 7}, "7 positions cannot be shared by 2 ranks: take a multiple of 2 as --block"),
    ({"vocab": 0}, "all sizes must be at least 1"),
]
UNEVEN = Setting(layers=4, vocab=40, block=8, batch=12, micro_batches=4)


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_sizes_that_some_way_cannot_take(changes, words):
    setting = Setting(**vars(SETTINGS[2]) | changes)
    with pytest.raises(BadInput, match=re.escape(words)):
        setting.check(2)


def test_pipelines_of_two_ranks_need_their_own_share_of_micro_batches():
    words = "--batch 12 is shared by 2 pipelines of 2 ranks and cut into 4 micro-batches"
    with pytest.raises(BadInput, match=re.escape(words) + ": take a multiple of 8"):
        UNEVEN.check(4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"steps": 0}, "--steps is 0"), ({"only": "magic"}, "--only 'magic' is in no name: DDP, Z")],
)
def test_settings_of_the_job_that_cannot_be(changes, words):
    with pytest.raises(BadInput, match=words):
        train_compare.main(train_compare.Config(**changes))


def test_the_job_writes_a_report_and_its_numbers(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(write_text(tmp_path))
    sizes = {"data": "text", "steps": 2, "layers": 2, "block": 8, "batch": 8}
    config = train_compare.Config(**sizes, device="cpu", only="zero")
    runs.train(train_compare, 2, config, quiet=False)
    out = capfd.readouterr().out.replace("[rank 0] ", "")
    assert "Warning" not in out and "[rank 1]" not in out
    folder = tmp_path / "runs" / "compare-001"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "result.json", "report.html", "report.png")
    }
    assert f"report: {folder.relative_to(tmp_path)}/report.html" in out
    result = json.loads((folder / "result.json").read_text())
    names = ["one process", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert list(result["ways"]) == names and result["backend"] == "gloo"
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 1 and "</html>" in page
    assert all(f">{name}</td>" in page for name in names)
    assert all(sum(line.startswith(name) for line in out.splitlines()) == 1 for name in names)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("three years of work")
    words = ["--out", "thesis", "--device", "cpu"]
    code, _, err = runs.start(train_compare, words, tmp_path)
    assert code == 2 and err.startswith("train_compare.py: --out thesis holds files but no run")
    assert err.count("\n") == 1
