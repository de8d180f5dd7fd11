"""What was granted, where a step's time goes, and how busy ranks, nodes and GPUs are."""

import json
import math
import os
import resource
import socket
import stat
import time
from pathlib import Path

import pynvml
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.data_parallel import replicas
from manyhands.instruments import gpus, meters
from manyhands.instruments.gpus import Gpus
from manyhands.instruments.meters import (
    PHASES,
    STEP_PHASES,
    Sampler,
    Stopwatch,
    idle_words,
    job,
    machine,
    quota_of_cores,
    reset_peaks,
    seconds_of,
)
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import SlowNetwork
from manyhands.ranks.runtime import World
from manyhands.training.storage import FORMAT, job_before, read_lines

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    """As if these tests did not run in a job."""
    for name in os.environ:
        if name.startswith(("SLURM_", "MANYHANDS_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)


def set_all(monkeypatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


# ---- what was granted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "number"),
    [("0,1,2,3", 4), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("2", 1), ("0,-1,1", 1)]
    + [("GPU-aa, GPU-bb", 2), ("MIG-aa", 1)],
)
def test_granted_gpus_are_those_that_cuda_shows(monkeypatch, visible, number):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # torch for CPUs only
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine(CPU)["num_gpus"] == number


def test_slurm_is_believed_in_a_batch_job_only(monkeypatch):
    alone = machine(CPU)
    set_all(monkeypatch, SLURM_GPUS_ON_NODE="7", SLURM_CPUS_ON_NODE="1", SLURM_JOB_ID="5")
    assert machine(CPU) == alone and job()["scheduler"] == "none"
    monkeypatch.setenv("MANYHANDS_BATCH", "1")
    assert (machine(CPU)["num_gpus"], machine(CPU)["num_cores"]) == (7, 1)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "9999")  # no more than this process may use
    assert machine(CPU)["num_cores"] == alone["num_cores"]


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5),
        ("0::/host/path", {"cpu.max": "400000 100000"}, 4),
        (
            "3:cpu,cpuacct:/pod\n2:memory:/\n0::/",
            {"cpu/pod/cpu.cfs_quota_us": "150000", "cpu/pod/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
    ],
)
def test_a_quota_of_cores_is_that_of_the_control_group(tmp_path, cgroup, files, cores):
    for name, text in {"proc/self/cgroup": cgroup}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert quota_of_cores(tmp_path) == cores
    assert quota_of_cores(tmp_path / "no linux") == math.inf


@pytest.mark.nightly
def test_a_real_quota_is_what_a_job_counts(tmp_path):
    """Of half a core; that needs root, and a file system of control groups of version 1."""
    group = Path("/sys/fs/cgroup/cpu") / f"manyhands-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as problem:
        pytest.skip(f"no control group can be made here: {problem}")
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        assert machine(torch.device("cpu"))["num_cores"] == 1
        (group / "cpu.cfs_quota_us").write_text("-1")
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def test_machine_says_what_a_report_needs():
    about = machine(CPU)
    assert about["host"] == socket.gethostname() and about["device"] == "cpu"
    assert about["num_threads"] == torch.get_num_threads()
    assert about["memory_bytes"] > 1e8 and about["num_cores"] >= 1


def make_scontrol(folder: Path, monkeypatch, script: str) -> None:
    """Put a program called scontrol first on the PATH."""
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


SHOW = """case $2 in
job) [ "$3" = 77 ] || exit 1; cat <<'X'
JobId=77 JobName=ddp
   Restarts=2 RunTime=00:00:02 TimeLimit=1-02:00:30 TimeMin=N/A
   StartTime=2026-11-21T20:07:00 EndTime=2026-11-22T22:07:30 Deadline=N/A
   Partition=gpu AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[1-2]
X
;;
hostnames) [ "$3" = "node[1-2]" ] && printf 'node1\\nnode2\\n' ;;
esac"""


def test_job_in_slurms_words(tmp_path, monkeypatch):
    make_scontrol(tmp_path, monkeypatch, SHOW)
    set_all(monkeypatch, MANYHANDS_BATCH="1", SLURM_JOB_ID="77", SLURM_RESTART_COUNT="2")
    words = job()
    start_s = time.mktime((2026, 11, 21, 20, 7, 0, 0, 0, -1))
    assert words == {
        "scheduler": "slurm",
        "id": "77",
        "name": "ddp",
        "partition": "gpu",
        "nodes": ["node1", "node2"],
        "time_limit_s": 26 * 3600 + 30,
        "restarts": 2,
        "starts_s": [start_s],
    }


def test_a_job_whose_id_is_its_arrays_reads_its_own_record_only(tmp_path, monkeypatch):
    other = "\nJobId=78 ArrayJobId=77 JobName=other\n   NodeList=node9\n"
    make_scontrol(tmp_path, monkeypatch, SHOW.replace("X\n;;", f"{other}X\n;;"))
    set_all(monkeypatch, MANYHANDS_BATCH="1", SLURM_JOB_ID="77")
    assert (job()["name"], job()["nodes"]) == ("ddp", ["node1", "node2"])


def test_newer_slurm_says_times_in_variables(tmp_path, monkeypatch):
    make_scontrol(tmp_path, monkeypatch, SHOW)
    set_all(monkeypatch, MANYHANDS_BATCH="1", SLURM_JOB_ID="77")
    set_all(monkeypatch, SLURM_JOB_START_TIME="1000", SLURM_JOB_END_TIME="1600")
    assert job()["time_limit_s"] == 600 and job()["starts_s"] == [1000.0]


@pytest.mark.parametrize(
    "script", ["exit 1", "sleep 30", "[ $2 = job ] && echo TimeLimit=UNLIMITED"]
)
def test_slurm_that_knows_nothing_or_hangs(tmp_path, monkeypatch, script):
    monkeypatch.setattr(meters, "SCONTROL_S", 0.2)
    make_scontrol(tmp_path, monkeypatch, script.replace("sleep", "exec sleep"))
    set_all(monkeypatch, MANYHANDS_BATCH="1", SLURM_JOB_ID="77", SLURM_JOB_NAME="ddp")
    before_s = time.time()
    words = job()
    assert words["time_limit_s"] is None and words["nodes"] == [socket.gethostname()]
    assert (words["scheduler"], words["id"], words["name"]) == ("slurm", "77", "ddp")
    assert before_s <= words["starts_s"][0] <= time.time() < before_s + 10


def test_a_run_that_goes_on_counts_its_lives(tmp_path):
    first = job()
    assert first["restarts"] == 0 and len(first["starts_s"]) == 1
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"format": FORMAT, "job": first}))
    second = job(job_before(str(tmp_path)))
    assert second["restarts"] == 1 and second["starts_s"][0] == first["starts_s"][0]
    config.write_text(json.dumps({"format": "another program", "job": "baker"}))
    assert job(job_before(str(tmp_path)))["restarts"] == 0
    config.write_text("{")
    with pytest.raises(BadInput):
        job_before(str(tmp_path))


def ranks_on(host: str, devices: list[str], **about: int) -> list[dict]:
    base = {"host": host, "num_gpus": 0, "num_cores": 8, "num_threads": 1} | about
    return [base | {"device": device} for device in devices]


def test_idle_devices_are_named_node_by_node():
    assert idle_words(ranks_on("node1", ["cuda:0"], num_gpus=4)) == [
        "3 of the 4 GPUs granted on node1 have no rank: start 4 ranks (RANKS=4) or ask for 1"
    ]
    twice = ranks_on("node1", ["cuda:0", "cuda:0"], num_gpus=2)  # two ranks on one GPU
    assert idle_words(twice)[0].startswith("1 of the 2 GPUs granted on node1 has no rank")
    on_cpu = idle_words(ranks_on("node1", ["cpu", "cpu"], num_gpus=4))
    assert on_cpu == [
        "4 of the 4 GPUs granted on node1 have no rank: train on GPUs or ask for none"
    ]
    assert idle_words(ranks_on("node1", ["cuda:0", "cuda:1"], num_gpus=2)) == []


def test_idle_cores_are_named_where_half_of_them_or_more_are_idle():
    (words,) = idle_words(ranks_on("n", ["cpu"] * 3))
    assert words.startswith("5 of the 8 cores granted on n have no rank: start 8 ranks")
    assert words.endswith("or ask for 3")
    assert "4 of the 8 cores" in idle_words(ranks_on("n", ["cpu"] * 4))[0]
    assert "1 of the 2 cores granted on n has" in idle_words(ranks_on("n", ["cpu"], num_cores=2))[0]
    assert idle_words(ranks_on("n", ["cpu"] * 5)) == []
    assert idle_words(ranks_on("n", ["cpu"], num_threads=5)) == []


def test_many_idle_nodes_are_counted_and_empty_nodes_are_named():
    ranks = [rank for n in range(7) for rank in ranks_on(f"node{n}", ["cuda:0"], num_gpus=2)]
    words = idle_words(ranks)
    assert len(words) == 5 and words[-1] == "3 more nodes likewise"
    busy = ranks_on("node1.cluster.example", ["cuda:0"], num_gpus=1)
    assert idle_words(busy, ["node1", "node2"]) == [
        "node2 is granted and has no rank: ask for fewer nodes"
    ]
    assert idle_words(busy, ["127.0.77.1", "127.0.77.2"]) == []  # other names: nothing is known


# ---- the time of a step ------------------------------------------------------------------------


def split_of(wrap, after_backward=lambda model: None, steps: int = 2) -> dict[str, float]:
    """On a rank: the least seconds of each phase; rank 1 comes to each backward 0.2 s late."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].bias.requires_grad_(False)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters())
    stopwatch = Stopwatch(CPU)
    stopwatch.watch(model, optimizer)
    splits = []
    for _ in range(steps):
        stopwatch.mark("data")
        loss = model(torch.randn(4, 8)).sum()
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.2)
        loss.backward()
        after_backward(model)
        optimizer.step()
        stopwatch.mark("other")
        splits.append(stopwatch.split())
    return {phase: min(split[phase] for split in splits) for phase in PHASES}


def exchange_slowly(model: nn.Module) -> None:
    """A message over a link of 0.2 s."""
    with SlowNetwork(latency_s=0.2, bytes_per_s=1e9):
        tensor = torch.zeros(4)
        if dist.get_rank() == 0:
            dist.recv(tensor, 1)
        else:
            dist.send(tensor, 0)


def test_the_wait_for_a_late_rank_is_communication():
    def split_by_kind() -> dict[str, dict]:
        def bare(model: nn.Module) -> nn.Module:
            return model

        return {
            "naive": split_of(bare, replicas.average_gradients),
            "overlapped": split_of(replicas.BucketedDDP),
            "torch": split_of(DistributedDataParallel),
            "slow link": split_of(bare, exchange_slowly),
        }

    early, late = run_ranks(split_by_kind, 2)
    for kind, split in early.items():
        assert split["communication"] > 0.15, kind
        assert split["backward"] < 0.15, kind  # the least of two
    for kind, split in late.items():
        assert split["backward"] > 0.15, kind
        slow = kind == "slow link"
        assert (split["communication"] > 0.15) == slow, kind


def test_one_process_has_no_communication_and_a_split_loses_no_time():
    def split_alone() -> dict[str, float]:
        return split_of(lambda model: model)

    assert run_ranks(split_alone, 1)[0]["communication"] == 0
    stopwatch = Stopwatch(CPU)
    stopwatch.mark("data")
    begin_s, total_s = stopwatch.marks[0][1], 0.0
    for phase in ("forward", "other", "checkpoint", "data"):
        time.sleep(0.005)
        stopwatch.mark(phase)
        total_s += sum(stopwatch.split().values())
    assert total_s == pytest.approx(stopwatch.marks[-1][1] - begin_s)


def test_communication_begins_with_the_last_gradient_of_the_last_backward():
    def split_accumulated() -> dict[str, float]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 1)
        model = nn.Sequential(first, second)
        first.register_forward_hook(lambda *args: args[2].register_hook(sleep_first) and None)
        optimizer, stopwatch = torch.optim.SGD(model.parameters()), Stopwatch(CPU)
        stopwatch.watch(model, optimizer)
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
            time.sleep(0.2)
            loss.backward()
        optimizer.step()
        return stopwatch.split()

    def sleep_first(_: torch.Tensor) -> None:
        """Between the gradients of the second layer, which come first, and those of the first."""
        time.sleep(0.2)

    for split in run_ranks(split_accumulated, 2):
        assert split["backward"] > 0.75 and split["communication"] < 0.2


@pytest.mark.gpu
def test_split_on_a_gpu_adds_up():
    device = torch.device("cuda:0")
    stopwatch, x = Stopwatch(device), torch.randn(500, 500, device=device)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for phase in STEP_PHASES:
        stopwatch.mark(phase)
        for _ in range(50):
            x = (x @ x).tanh()
    stopwatch.mark("data")
    spent_s = sum(stopwatch.split().values())
    assert 0 < spent_s <= time.perf_counter() - start_s


# ---- samples -----------------------------------------------------------------------------------


def test_samples_of_a_rank_and_of_its_node(tmp_path):
    (tmp_path / "ranks").mkdir()
    sampler = Sampler.in_folder(tmp_path, World(3, 0, 8, CPU))
    second = Sampler.in_folder(tmp_path, World(4, 1, 8, CPU))  # another rank of that node
    end_s = time.perf_counter() + 0.8
    while time.perf_counter() < end_s:
        sum(range(1000))
    sampler.stop()
    second.stop()
    assert sampler.error is None and second.error is None
    rank = read_lines(tmp_path / "ranks" / "rank-00003.jsonl")
    assert [line.keys() for line in rank] == [{"time_s", "cpu", "gpu", "memory_bytes"}] * 2
    assert 0.05 < max(line["cpu"] for line in rank) < 1.5
    assert (tmp_path / "ranks" / "rank-00004.jsonl").exists()
    (path,) = (tmp_path / "nodes").iterdir()
    node = read_lines(path)
    assert path.name == f"{socket.gethostname()}.jsonl" and len(node) == 2
    assert [line.keys() for line in node] == [{"time_s", "cpu", "memory_bytes", "gpus"}] * 2
    assert node[0]["memory_bytes"] > rank[0]["memory_bytes"] > 1e6
    assert max(line["cpu"] for line in node) > 0.05


def test_granted_gpus_are_in_every_sample_of_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sampler = Sampler(tmp_path / "rank", CPU, tmp_path / "node", every_s=0.01)
    time.sleep(0.1)
    sampler.stop()
    lines = read_lines(tmp_path / "node")
    assert len(lines) > 1
    for gpu in [gpu for line in lines for gpu in line["gpus"]]:
        assert {"percent", "memory_bytes", "power_w"} <= gpu.keys()
        assert gpu["percent"] is not None or gpu["why"]  # a reason, where there is no number
    assert all(len(line["gpus"]) == 4 for line in lines)


def test_a_sampler_that_cannot_write_says_so(tmp_path):
    def sample_on_full_disk(folder: Path) -> str | None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        sampler = Sampler(folder / "rank", CPU, folder / "node", every_s=0.01)
        sampler.thread.join(5)
        return sampler.error

    (error,) = run_ranks(sample_on_full_disk, 1, tmp_path)
    assert error and "cannot write" in error and "File too large" in error
    lost = Sampler(tmp_path / "none" / "rank", CPU)
    lost.thread.join(5)
    assert "cannot write" in lost.error and "none" in lost.error


class Driver:
    """Stands in for NVIDIA's library, which this machine may lack: GPUs 0 to 3, one of them odd."""

    def install(self, monkeypatch) -> None:
        for name in ("Init", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetHandleByUUID"):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name))
        for name in ("UtilizationRates", "MemoryInfo", "PowerUsage"):
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", getattr(self, name))

    def Init(self) -> None:
        self.ready = True

    def DeviceGetCount(self) -> int:
        assert self.ready
        return 4

    def DeviceGetHandleByIndex(self, index: int) -> int:
        if index > 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def DeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-0"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid.removeprefix("GPU-0"))

    def UtilizationRates(self, handle: int) -> pynvml.c_nvmlUtilization_t:
        if handle == 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.c_nvmlUtilization_t(gpu=10 * handle + 5)

    def MemoryInfo(self, handle: int) -> pynvml.c_nvmlMemory_t:
        return pynvml.c_nvmlMemory_t(used=1000 * (handle + 1))

    def PowerUsage(self, handle: int) -> int:
        return 100_050 + handle


def test_gpus_in_the_order_of_cuda(monkeypatch):
    Driver().install(monkeypatch)
    assert [Gpus(2).sample(index)["percent"] for index in range(2)] == [5, 15]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert Gpus(2).sample(0) == {"percent": 25, "memory_bytes": 3000, "power_w": 100.1}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-01, GPU-00")
    assert [Gpus(2).sample(index)["memory_bytes"] for index in range(2)] == [2000, 1000]


def test_what_nvml_cannot_tell_has_its_words(monkeypatch):
    Driver().install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7,MIG-aa")
    seen = Gpus(4)
    part = {"percent": None, "memory_bytes": 4000, "power_w": 100.1}
    assert seen.sample(0) == part | {"why": "percent: Not Supported"}
    nothing = {"percent": None, "memory_bytes": None, "power_w": None}
    for index in range(1, 4):  # no such GPU, no such part, and one that is granted but not shown
        assert seen.sample(index).items() >= nothing.items()
        assert seen.sample(index)["why"]


def test_without_a_driver_the_reason_is_nvmls(monkeypatch):
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(gpus.pynvml, "nvmlInit", fail)
    assert Gpus(1).sample(0)["why"] == "NVML Shared Library Not Found"


@pytest.mark.gpu
def test_a_real_gpu_tells_all():
    sample = Gpus(torch.cuda.device_count()).sample(0)
    assert 0 <= sample["percent"] <= 100 and sample["memory_bytes"] > 1e6, sample
    assert sample["power_w"] > 1, sample


def test_time_limits_of_slurm():
    assert seconds_of("00:20:00") == 1200 and seconds_of("1-02:00:03") == 93603
    assert seconds_of("UNLIMITED") is seconds_of("Partition_Limit") is None


def test_what_happens_inside_all_as_belongs_to_one_phase():
    watch = meters.Stopwatch(torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    watch.watch(model, None)
    watch.mark("data")
    with watch.all_as("validation"):
        model(torch.ones(1, 2))
        time.sleep(0.02)
    watch.mark("data")
    found = watch.split()
    assert found["validation"] > 0.02 and found["forward"] == found["backward"] == 0


def test_peaks_are_reset_on_the_gpu_of_the_rank_and_never_on_a_cpu(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    reset_peaks(CPU)
    assert reset == []
    reset_peaks(torch.device("cuda:3"))
    assert reset == [torch.device("cuda:3")]
