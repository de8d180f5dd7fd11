"""`make gpu` without a GPU: every part at a tiny size on CPU ranks, formulas, limits, the page."""

import inspect
import json
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bench_collectives
import train_fsdp
import train_mesh
import train_pipeline
import train_tensor
from commands import ROOT, environment
from manyhands.fsdp.units import FSDP
from manyhands.gpu import figures, jobs, memory, page, peaks, plan, scales, sharding, speed
from manyhands.gpu import techniques as pairs
from manyhands.gpu.measuring import Memory, one_line
from manyhands.ranks.lab import run_ranks

CPU = torch.device("cpu")
TINY = scales.TINY
SCRIPT = ROOT / "scripts" / "gpu.py"
QUICK = plan.Part("Jobs", None, limit_s=1)


def test_without_a_gpu_it_stops_with_one_line():
    environ = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, SCRIPT], env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu.py: torch") and "sees no GPU" in line and "--device cpu" in line


# ---- the parts ---------------------------------------------------------------------------------


def both_agree(num_ranks: int, *parts) -> None:
    def run_all() -> list:
        return [part(CPU, TINY) for part in parts]

    for rows in run_ranks(run_all, num_ranks, timeout_s=60)[0]:
        (row,) = rows
        assert row["ranks"] == num_ranks
        assert row["loss by hand"] == pytest.approx(row["loss native"], abs=1e-3)
        for side in ("by hand", "native"):
            assert row[f"{side} (s)"] > 0 and row[f"{side} peak_bytes"] > 0


def test_two_ranks_by_hand_and_native_have_the_same_loss(monkeypatch):
    monkeypatch.setenv("MANYHANDS_RULES", "nccl")  # the ranks are held to the rules of NCCL
    both_agree(2, pairs.ddp, pairs.fsdp, pairs.pipeline, pairs.tensor)


def test_a_world_of_one_compares_what_needs_no_second_rank():
    both_agree(1, pairs.ddp, pairs.fsdp)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gathering_ahead_and_offloading_have_a_row_for_each_way(num_ranks):
    def run_both() -> tuple:
        return sharding.prefetch(CPU, TINY), sharding.offload(CPU, TINY)

    ahead, offloaded = run_ranks(run_both, num_ranks, timeout_s=60)[0]
    assert [row["what"].split()[-1] for row in ahead] == ["ahead", "needed"]
    assert all(row["step_s"] > 0 and row["ranks"] == num_ranks for row in [*ahead, *offloaded])
    assert all(row["peak_bytes"] > 0 for row in offloaded)


def test_held_weights_are_gathered_only_when_they_are_needed():
    def what_comes(is_held: bool) -> list[bool]:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model = FSDP(layers, list(layers))
        for unit in model.units:
            for flat in unit:
                if is_held:
                    sharding.hold(flat)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        model.before_forward(1)  # the first layer
        return [flat.is_whole for unit in model.units[1:3] for flat in unit]

    assert run_ranks(what_comes, 2, False) == [[True, True]] * 2
    assert run_ranks(what_comes, 2, True) == [[True, False]] * 2


def test_memory_is_as_predicted():
    rows = memory.memory(CPU, TINY)
    assert [row["part"] for row in rows] == [*memory.Bytes._fields] * 2
    for row in rows:
        # Live also counts the targets, which are there before, once an operator has seen them.
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.02), row
    exact = {row["part"]: row["measured"] for row in rows[:3]}
    num = TINY.small.num_parameters
    assert exact["weights"] == exact["gradients"] == 4 * num
    shape = scales.Shape("wider", 3, 4, 64, vocab=1000, block=64, batch=4)
    wanted = memory.predict(shape, 4, torch.float32)
    assert memory.measure(shape, 4, torch.float32, CPU) == pytest.approx(wanted, rel=0.002)


def test_memory_now_and_at_its_peak():
    with Memory(CPU) as gauge:
        one = torch.ones(1000)
        assert gauge.now() == 4000
        gauge.begin_peak()
        two = one + 1
        del one
        assert (gauge.now(), gauge.peak()) == (4000, 8000)
    assert two.nbytes == 4000


def test_on_a_gpu_memory_asks_the_allocator_and_leaves_out_what_was_there_before(monkeypatch):
    allocated, peaks_of = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peaks_of.append)
    allocated += [100, 350]
    with Memory(torch.device("cuda:1")) as gauge:
        assert (gauge.now(), gauge.peak()) == (250, 800)
    assert peaks_of == [torch.device("cuda:1")]


def test_speed_has_a_row_for_the_product_and_for_each_model():
    rows = [*speed.speed(CPU, TINY), *speed.compiled(CPU, TINY)]
    assert [row.get("compiled") for row in rows] == [None, False, False, True, True]
    assert not any("why" in row for row in rows)
    for row, shape in zip(rows[1:], [TINY.small, TINY.large] * 2, strict=True):
        assert row["parameters"] == sum(p.numel() for p in shape.build(CPU).parameters())
        assert row["tokens_per_s"] == pytest.approx(shape.batch * shape.block / row["step_s"])
        assert row["flops_per_s"] == pytest.approx(row["tokens_per_s"] * shape.flops_per_token)
    peaks.utilisation(rows, 2 * rows[1]["flops_per_s"])
    assert rows[1]["utilisation"] == 0.5


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch):
    tried = []

    def train(shape, device, compiler, steps, batch):
        tried.append(batch)
        if batch > most:
            raise torch.cuda.OutOfMemoryError("no room")
        return {"batch": batch}

    monkeypatch.setattr(speed, "train", train)
    monkeypatch.setattr(speed, "free", lambda device, compiler: None)
    most = 10
    assert speed.train_fitting(scales.FULL.small, CPU, "", 1) == {"batch": 8}
    assert tried == [32, 16, 8]
    most = 0
    rows = speed.train_models(CPU, scales.FULL, "")
    assert [row["why"] for row in rows] == ["OutOfMemoryError: no room"] * 2


# ---- formulas ----------------------------------------------------------------------------------


def test_sizes_and_flops_of_the_models_are_those_counted_by_hand():
    small, large = scales.FULL.small, scales.FULL.large
    # Matrices: 12 D^2 a layer, and the head; embeddings besides: T D. Norms: 2 D a layer, and D.
    matrices = 12 * 12 * 768**2 + 50304 * 768
    assert small.num_parameters == matrices + 1024 * 768 + 12 * 2 * 768 + 768 == 124_373_760
    assert large.num_parameters == 24 * (12 * 1024**2 + 2048) + (50304 + 1024) * 1024 + 1024
    # 6 a weight; attention 2 T D for scores and 2 T D for values a layer, three times.
    assert small.flops_per_token == 6 * matrices + 3 * 12 * 4 * 1024 * 768 == 854_654_976


def test_flops_of_matrices_are_those_that_torch_counts():
    shape = TINY.small
    model, (inputs, targets) = shape.build(CPU), shape.tokens(CPU)
    with FlopCounterMode(display=False) as counter:
        model(inputs, targets).backward()
    by_name = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for name, flops in by_name.items() if "mm" in name)
    attention = 3 * shape.layers * 4 * shape.block * shape.width
    num_tokens = shape.batch * shape.block
    assert products == num_tokens * (shape.flops_per_token - attention)


def test_the_peak_of_a_gpu_is_found_by_its_name():
    def tflops(name: str) -> float | None:
        found = peaks.peak_of(name)
        return found and found.flops_per_s / 1e12

    assert tflops("NVIDIA H100 80GB HBM3") == tflops("NVIDIA H200") == 989
    assert tflops("NVIDIA H100 PCIe") == 756 and tflops("NVIDIA H100 NVL") == 835
    assert tflops("NVIDIA A100-SXM4-80GB") == tflops("NVIDIA A100 80GB PCIe") == 312
    assert tflops("NVIDIA L40S") == 362 and tflops("NVIDIA L4") == 121
    assert tflops("NVIDIA GeForce RTX 4090") == 165.2
    assert tflops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert tflops("") is tflops("NVIDIA T400") is None
    assert all(peak.source for peak in peaks.PEAKS.values())


# ---- jobs, limits and failures -----------------------------------------------------------------


def test_every_job_of_the_course_is_run_with_flags_that_its_script_takes():
    for num_ranks in range(1, 9):
        runs = jobs.flags(num_ranks)
        names = {path.stem for path in plan.SBATCH.glob("*.sbatch")} - {"solution"}
        assert {run.partition(" ")[0] for run in runs} == names
        for run, flags in runs.items():
            word = run.partition(" ")[0]
            script = "bench" if word == "collectives" else "train"
            config_class = import_module(f"{script}_{word}").Config
            config = tyro.cli(config_class, args=[*shlex.split(flags), "--device", "cpu"])
            assert getattr(config, "block", 0) % num_ranks == 0
            if hasattr(config, "micro_batches"):
                assert config.batch % config.micro_batches == 0


def setting(folder: Path, left_s: float = 60) -> plan.Setting:
    return plan.Setting(folder, "cpu", 2, True, time.monotonic() + left_s)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch) -> Path:
    """Job files of our own: one sleeps, one fails with words, one says why it fails."""
    folder = tmp_path / "sbatch"
    folder.mkdir()
    (folder / "sleeps.sbatch").write_text("sleep 600\n")
    (folder / "fails.sbatch").write_text("echo first; echo 'the last words'; exit 3\n")
    (folder / "tells.sbatch").write_text('mkdir -p "$4"; echo "Error: x" >"$4/why.txt"; exit 1\n')
    (folder / "works.sbatch").write_text("exit 0\n")
    monkeypatch.setattr(plan, "SBATCH", folder)
    monkeypatch.setattr(plan, "LEAST_S", 0.1)
    names = ("sleeps", "fails", "tells", "works")
    monkeypatch.setattr(jobs, "flags", lambda num_ranks: dict.fromkeys(names, ""))
    return folder


def test_a_job_that_fails_or_is_late_says_so_in_a_row_and_the_others_go_on(tmp_path, sbatch):
    part = plan.run_part("jobs", QUICK, setting(tmp_path), 2)
    states = {row["job"]: (row["state"], row["why"]) for row in part["rows"]}
    assert states == {
        "sleeps": ("failed", "not done after 1 s; see job-sleeps.log"),
        "fails": ("failed", "exit code 3: the last words"),
        "tells": ("failed", "Error: x; see job-tells.log"),  # --device cpu --out FOLDER
        "works": ("done", ""),
    }
    assert part["state"] == "failed" and part["why"].startswith("failed: sleeps, fails")


def test_what_does_not_begin_in_time_is_left_out(tmp_path, sbatch):
    part = plan.run_part("jobs", QUICK, setting(tmp_path, left_s=0), 2)
    assert {row["state"] for row in part["rows"]} == {"left out"}
    assert part["state"] == "done" and "time for all parts" in part["rows"][0]["why"]


def test_the_first_rank_s_reason_is_told_before_the_log_s_last_line(tmp_path):
    class Ended:
        log = tmp_path / "ddp.log"
        state = type("State", (), {"code": 1})

    Ended.log.write_text("a traceback\nits last line\n")
    assert plan.reason(tmp_path, Ended) == "exit code 1: its last line"
    (tmp_path / "why.txt").write_text(one_line(ValueError("too large\nand C++ behind it")))
    assert plan.reason(tmp_path, Ended) == "ValueError: too large; see ddp.log"


def test_parts_that_need_two_gpus_say_so_on_one(tmp_path):
    alone = plan.Setting(tmp_path, "cuda", 1, False, time.monotonic())
    outcomes = dict(plan.run_all(alone, "pipeline"))
    assert outcomes["pipeline"]["state"] == "left out"
    assert outcomes["pipeline"]["why"] == "needs 2 GPUs, and there is 1"


# ---- the whole command -------------------------------------------------------------------------


def run_command(folder: Path, only: str, device: str = "cpu") -> dict:
    out = folder / "gpu-001"
    words = [SCRIPT, "--device", device, "--tiny", "--only", only, "--out", out]
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "gpu.json").read_text())


def test_the_command_runs_a_part_on_two_ranks_and_writes_numbers_and_page(tmp_path):
    result = run_command(tmp_path, "prefetch")
    part = result["parts"]["prefetch"]
    assert part["state"] == "done" and part["ranks"] == 2 and len(part["rows"]) == 2
    assert result["machine"]["device"] == "cpu" and result["peak"] is None
    text = (tmp_path / "gpu-001" / "report.html").read_text()
    assert "weights gathered when needed" in text and "the times say nothing" in text


@pytest.mark.gpu
@pytest.mark.parametrize("only", ["memory", "ddp", "fsdp", "offload"])
def test_on_a_gpu_a_part_is_done_and_predicts_its_memory(tmp_path, only):
    part = run_command(tmp_path, only, device="cuda")["parts"][only]
    assert part["state"] == "done" and part["rows"]
    for row in part["rows"]:
        if row.get("part") == "weights":
            assert row["measured"] == pytest.approx(row["predicted"], rel=0.5)  # blocks of 512


def test_bus_bandwidth_is_that_of_nccl_s_tests(tmp_path, monkeypatch):
    """The job is given the part's words, on ranks of a fork server."""

    def start(file, words, name, setting, ranks, limit_s) -> tuple:
        assert file == "collectives.sbatch"
        args = [*words, "--out", str(setting.folder / name)]
        config = tyro.cli(bench_collectives.Config, args=args)
        run_ranks(bench_collectives.main, ranks, config, join=False, quiet=True, timeout_s=60)
        return "done", "", None

    monkeypatch.setattr(plan, "start", start)
    part = plan.run_part("bandwidth", plan.PARTS["bandwidth"], setting(tmp_path), 2)
    assert part["state"] == "done"
    assert {row["what"] for row in part["rows"]} == {*plan.BUS, "memory copy"}
    factors = {"all_reduce": 2 * 1 / 2, "all_gather": 1 / 2, "reduce_scatter": 1 / 2}
    for row in part["rows"]:
        rate = row["size_bytes"] / row["call_s"]
        assert row["algorithm_bytes_per_s"] == pytest.approx(rate)
        assert row["bus_bytes_per_s"] == pytest.approx(factors.get(row["what"], 1) * rate)
    assert figures.draw("bandwidth", part["rows"]) is not None


# ---- the page ----------------------------------------------------------------------------------


def fake_result() -> dict:
    """What a run on one GPU could give; a part has failed, and one is left out."""
    row = {"step_s": 0.06, "tokens_per_s": 5.2e5, "flops_per_s": 4.45e14, "batch": 32}
    trained = {"what": "125 M", "compiled": True, "block": 1024, "utilisation": 0.45} | row
    failed = {"what": "350 M", "compiled": True, "why": "OutOfMemoryError: <no room>"}
    part = {"title": "T", "ranks": 1, "state": "done", "why": "", "time_s": 60.0, "rows": []}
    pair = {"loss by hand": 10.9, "loss native": 10.9, "by hand (s)": 0.2, "native (s)": 0.1}
    pair |= {"by hand peak_bytes": 3_000_000, "native peak_bytes": 2_000_000}
    return {
        "remake": "make gpu",
        "date": "2026-01-01",
        "torch": "2.13.0",
        "device": "cuda",
        "ranks": 1,
        "tiny": False,
        "time_s": 400,
        "machine": {"name": "NVIDIA H100 80GB HBM3"},
        "peak": {"flops_per_s": 989e12, "source": "a data sheet"},
        "parts": {
            "compiled": part | {"rows": [trained, failed]},
            "ddp": part | {"rows": [{"model": "125 M", "ranks": 1} | pair]},
            "fsdp": part | {"state": "failed", "why": "RuntimeError: NCCL <error>"},
            "pipeline": part | {"state": "left out", "why": "needs 2 GPUs, and there is 1"},
        },
    }


def test_the_page_holds_sentences_that_follow_from_the_rows(tmp_path):
    page.write_page(tmp_path, fake_result())
    text = (tmp_path / "report.html").read_text()
    assert "1 rank, each on NVIDIA H100 80GB HBM3" in text and "2 of 4" in text
    assert "45.0% of the 989 TFLOP/s" in text and "(a data sheet)" in text
    assert "The goal of 50% on an H100 or H200 is not reached here." in text
    assert "2.00 times as long as PyTorch&#39;s, and 1.50 times as many bytes" in text
    assert "This is a world of one" in text
    assert "RuntimeError: NCCL &lt;error&gt;" in text and "&lt;no room&gt;" in text
    assert "needs 2 GPUs, and there is 1" in text and "None" not in text


def test_every_part_has_a_sentence_and_no_column_lacks_a_unit():
    assert page.WORDS.keys() == plan.PARTS.keys()
    assert (
        page.cell("step_s", 0.0012) == "1.20 ms" and page.cell("bus_bytes_per_s", 3e9) == "3 GB/s"
    )
    assert page.cell("peak_bytes", 2_500_000) == "2.5 MB" and page.cell("compiled", True) == "yes"


# ---- what jobs do on GPUs ----------------------------------------------------------------------


@pytest.mark.parametrize("script", [train_fsdp, train_pipeline, train_tensor, train_mesh])
def test_jobs_reset_the_peak_after_sharding_and_watch_their_own_device(script):
    """No CPU has such a peak, so the order of the lines is what can be seen here."""
    text = inspect.getsource(script.train)
    places = [text.index(words) for words in ("= Live(", "reset_peaks(world.device)", "run.epochs")]
    assert places == sorted(places) and text.count("device=world.device)") == 1


def test_the_pipeline_s_stages_are_gathered_from_the_memory_of_the_cpu(monkeypatch):
    moved, sent = [], []
    to_cpu = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(to_cpu(tensor).clone())
        return moved[-1]

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(dist, "gather_object", lambda value, *_, **__: sent.append(value))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    place = train_pipeline.Place(None, None, None, (0, 1), 2, range(1), 2)
    own = {0: nn.Linear(2, 3)}
    train_pipeline.gather(own, place, None, Path("unused"))
    (weights,) = sent
    assert set(weights[0]) == {"weight", "bias"}
    assert all(any(one is tensor for one in moved) for tensor in weights[0].values())
