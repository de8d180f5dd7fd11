"""Lesson 00: its functions against published figures, NumPy, real ranks, bash and a real Slurm;
and its checks' own reading of job files against Slurm's."""

import math
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from answers.first_job import job_with
from cluster import SCRIPT
from manyhands.checks import first_job as check
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.exercise import judge
from manyhands.checks.first_job import directives, files
from manyhands.checks.first_job import site as site_rules
from manyhands.data import images
from manyhands.first_job.history import TRAININGS, doubling_months
from manyhands.first_job.job_text import BROKEN, mended_job
from manyhands.first_job.places import Place, device_map, prepare_once
from manyhands.first_job.planning import days_on_devices, device_hours, my_share, solid_share
from manyhands.first_job.power_law import error_rate, fit_power_law, train_on
from manyhands.first_job.rehearsal import rehearse, run_here
from manyhands.first_job.site import SITE, site_file
from manyhands.ranks.lab import run_ranks

# ---- how long a training takes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("petaflops_days", "num_devices", "peak_tflops", "utilisation", "days", "within"),
    [
        # A course's slide: 1000 PF/s-days are "O(30 days)" on a DGX H100 of 32 PF/s.
        (1000, 8, 4000, 1.0, 30, 0.05),
        # Brown et al. 2020: GPT-3 is 3,640 PF/s-days. Narayanan et al. 2021 say 34 days on 1,024
        # A100 at 140 of 312 TFLOP/s, with recomputation: 8 FLOPs a parameter and token, not 6.
        (3640 * 8 / 6, 1024, 312, 140 / 312, 34, 0.02),
        # Chowdhery et al. 2022: PaLM, 2.56e24 FLOPs at 46.2 % of 275 TFLOP/s on 6,144 TPU v4.
        (2.56e24 / 8.64e19, 6144, 275, 0.462, 38, 0.02),
        (1, 1, 1000, 1.0, 1, 1e-12),
    ],
)
def test_days_of_published_trainings(
    petaflops_days, num_devices, peak_tflops, utilisation, days, within
):
    found = days_on_devices(petaflops_days, num_devices, peak_tflops, utilisation)
    assert math.isclose(found, days, rel_tol=within), found


# ---- who is where --------------------------------------------------------------------------------


def map_on_two_nodes():
    """Ranks 0 to 2 on node b, rank 3 on node a, which has no GPU; then with too few on each."""
    rank = dist.get_rank()
    on_b = rank < 3
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "13"[on_b]}
    node = ("b", 3) if on_b else ("a", 0)
    return [device_map(environ, node[1], node[0]), device_map(environ, 2, "c")]


def test_every_rank_holds_the_same_map():
    whole = [(0, "b", 0, "cuda:0"), (1, "b", 1, "cuda:1"), (2, "b", 2, "cuda:2")]
    whole += [(3, "a", 0, "cpu")]
    results = run_ranks(map_on_two_nodes, 4)
    for job, too_few in results:
        assert job == whole and all(isinstance(place, Place) for place in job)
        assert [place.device for place in too_few] == ["cpu", "cpu", "cpu", "cuda:0"]


def prepare_on_two_nodes(folder: str, is_shared: bool, fails: bool):
    """Two ranks on each of two nodes: what is read, or the error; whether this rank prepared."""
    rank = dist.get_rank()
    place = Place(rank, f"node{rank // 2}", rank % 2, "cpu")
    file = Path(folder, "all" if is_shared else place.host)
    calls = []

    def prepare():
        calls.append(rank)
        time.sleep(0.1)
        if fails and rank == 0:
            raise OSError("disk full")
        file.write_text(f"by {rank}")

    try:
        return prepare_once(prepare, file.read_text, place, is_shared), calls
    except RuntimeError as error:
        return str(error), calls


@pytest.mark.parametrize(
    ("is_shared", "fails", "found", "called"),
    [
        (True, False, ["by 0"] * 4, [0]),
        (False, False, ["by 0", "by 0", "by 2", "by 2"], [0, 2]),
        (True, True, ["rank 0 could not prepare the data: OSError('disk full')"] * 4, [0]),
        (False, True, ["rank 0 could not prepare the data: OSError('disk full')"] * 4, [0, 2]),
    ],
)
def test_data_is_prepared_once_in_each_folder(tmp_path, is_shared, fails, found, called):
    results = run_ranks(prepare_on_two_nodes, 4, str(tmp_path), is_shared, fails)
    assert [value for value, _ in results] == found
    assert sum((calls for _, calls in results), []) == called


# ---- the growth of compute -----------------------------------------------------------------------


def test_the_growth_is_that_of_the_sources():
    named = {one.name: one for one in TRAININGS}
    assert [one.time for one in TRAININGS] == sorted(one.time for one in TRAININGS)
    # Amodei and Hernandez say 300,000 times, and a doubling time of 3.4 months over all points.
    assert 3.0 < doubling_months(named["AlexNet"], named["AlphaGo Zero"]) < 3.8
    assert named["GPT-3"].petaflops_days == pytest.approx(6 * 175e9 * 300e9 / 8.64e19, rel=0.01)
    assert named["Llama 3 405B"].petaflops_days == pytest.approx(3.8e25 / 8.64e19, rel=0.01)


# ---- independent tasks ---------------------------------------------------------------------------


def test_shares_are_numpys_strides_complete_and_even():
    for num_tasks in range(20):
        tasks = [f"task {number}" for number in range(num_tasks)]
        for world_size in range(1, 8):
            pieces = [solid_share(tasks, rank, world_size) for rank in range(world_size)]
            assert sum(pieces, []) == tasks
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
            shares = [my_share(tasks, rank, world_size) for rank in range(world_size)]
            for rank, share in enumerate(shares):
                assert share == np.array(tasks, dtype=object)[rank::world_size].tolist()
            assert sorted(sum(shares, [])) == sorted(tasks)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_share_is_what_torchs_sampler_gives_and_the_list_stays():
    tasks = list(range(24))
    for rank in range(4):
        share = my_share(tasks, rank, 4)
        assert share == list(DistributedSampler(tasks, 4, rank, shuffle=False))
        share.clear()
    assert tasks == list(range(24)) and my_share(range(5), 1, 3) == [1, 4]


# ---- a power law ---------------------------------------------------------------------------------


def test_the_fit_is_numpys_and_finds_an_exact_law():
    draw = np.random.default_rng(1)
    for _ in range(20):
        sizes = draw.integers(10, 10_000, 12).tolist()
        errors = draw.uniform(0.001, 1, 12).tolist()
        slope, intercept = np.polyfit(np.log(sizes), np.log(errors), 1)
        assert np.allclose(fit_power_law(sizes, errors), (math.exp(intercept), -slope), rtol=1e-9)
    assert np.allclose(fit_power_law((10, 1000), (0.2, 0.02)), (0.2 * 10**0.5, 0.5))
    assert np.allclose(fit_power_law([1, 10, 10, 100], [3, 30, 30, 300]), (3, -1))
    assert all(type(value) is float for value in fit_power_law([1, 2], [1, 0.5]))


def test_no_other_line_is_nearer():
    sizes, errors = [20, 40, 40, 80], [0.5, 0.4, 0.2, 0.21]

    def distance(a: float, b: float) -> float:
        points = zip(sizes, errors, strict=True)
        return sum((math.log(error) - math.log(a * size**-b)) ** 2 for size, error in points)

    a, b = fit_power_law(sizes, errors)
    for factor in (0.99, 1.01):
        assert distance(a, b) < min(distance(a * factor, b), distance(a, b * factor))


class Sees(nn.Module):
    """Takes an image for the class that its first pixel says."""

    def forward(self, inputs):
        return nn.functional.one_hot(inputs.flatten(1)[:, 0].long(), 3).float()


def test_the_error_rate_is_a_share():
    inputs = torch.tensor([0.0, 1.0, 2.0, 2.0, 1.0]).reshape(5, 1, 1, 1)
    assert error_rate(Sees(), inputs, torch.tensor([0, 1, 2, 2, 1])) == 0
    assert error_rate(Sees(), inputs, torch.tensor([0, 2, 2, 0, 1])) == pytest.approx(0.4)


def test_more_digits_give_fewer_mistakes():
    data = images.load("embedded")
    errors = {}
    for size in (20, 160, 1280):
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            chosen = torch.randperm(len(data.train_inputs))[:size]
            model = train_on(data.train_inputs[chosen], data.train_labels[chosen], 10)
            found.append(error_rate(model, data.test_inputs, data.test_labels))
        errors[size] = sum(found) / 2
    assert errors[20] > 1.5 * errors[160] > 2 * errors[1280] and errors[1280] < 0.06, errors
    assert sum(param.numel() for param in model.parameters()) == 4810  # as the heading says
    assert 0.2 < fit_power_law(list(errors), list(errors.values()))[1] < 0.9


def test_a_training_can_be_done_again():
    inputs, labels = torch.rand(30, 1, 4, 4), torch.arange(30) % 3
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(train_on(inputs, labels, 3)[1].weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# ---- job files -----------------------------------------------------------------------------------


def bash(text: str, *flags: str) -> str:
    return subprocess.run(
        ["bash", *flags], input=text, capture_output=True, text=True, check=True, timeout=20
    ).stdout


def test_the_mended_file_is_bash_and_starts_one_torchrun_on_each_node():
    assert bash(mended_job(), "-n") == "" and bash(BROKEN, "-n") == ""
    found = rehearse(mended_job(), ["n3", "n7", "n8"], job_id=12_345)
    assert [start.node for start in found.starts] == ["n3", "n7", "n8"]
    assert {" ".join(start.words[-3:]) for start in found.starts} == {
        "--rdzv-id=12345 --rdzv-endpoint=n3:22345 train.py"
    }
    assert "job 12345 runs on n[3,7,8]" in found.said


def test_a_rehearsal_starts_what_srun_would():
    text = "srun {} python train.py\nexit 3"
    for flags, tasks, nodes in [
        ("", 1, "ab"),
        ("", 2, "aabb"),
        ("-N1 -n1", 2, "a"),
        ("--nodes 2 --ntasks=2 --cpus-per-task 4", 4, "ab"),
        ("--ntasks-per-node=3 --kill-on-bad-exit", 1, "aaabbb"),
    ]:
        found = rehearse(text.format(flags), ["a", "b"], tasks)
        assert "".join(start.node for start in found.starts) == nodes, flags
        assert {tuple(start.words) for start in found.starts} == {("python", "train.py")}


SAYS_ITS_NAME = r"""
import os, sys
sys.stdout.write(" ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) + "\n")
"""


def test_the_mended_file_really_starts_eight_ranks():
    said = run_here(mended_job(), SAYS_ITS_NAME, limit_s=200).splitlines()
    assert sorted(said)[:8] == [f"{rank} {rank % 4} 8" for rank in range(8)], said


def test_a_job_that_does_not_end_is_ended():
    with pytest.raises(TimeoutError, match="after 0.5 s"):
        run_here("srun sleep 60", "", limit_s=0.5)


def test_the_broken_file_has_each_of_the_faults_that_the_lesson_names():
    case = files.grants()[0]
    seen = [fault[0] for fault in files.faults_of(BROKEN, case)]
    for words in ("--error", "gives 1 of", "--mem=64 ", "--time=01:30", "logs/", "and not on"):
        assert sum(words in one for one in seen) == 1, (words, seen)
    with_srun = BROKEN.replace("torchrun", "srun torchrun")
    seen = [fault[0] for fault in files.faults_of(with_srun, case)]
    assert any("torchrun starts 4 times on each node" in one for one in seen)
    once = with_srun.replace("per-node=4\n", "per-node=1\n")
    assert any("the nodes meet at g07" in fault[0] for fault in files.faults_of(once, case))


def shown(slurm, path: Path) -> dict[str, str]:
    """What Slurm has read in a job file, as {'TimeLimit': '01:30:00', ...}; nothing has run."""
    job = slurm.sbatch("--hold", path, cwd=path.parent)
    text = slurm.run("scontrol", "show", "job", job)
    slurm.run("scancel", job)
    return dict(re.findall(r"(\S+?)=(\S*)", text)) | {"id": job}


def minutes(time: str) -> int:
    """Slurm's days-hours:minutes:seconds."""
    days, _, rest = time.rpartition("-")
    hours, mins, seconds = map(int, rest.split(":"))
    return int(days or 0) * 1440 + hours * 60 + mins + seconds // 60


def test_slurm_reads_the_mended_file_as_it_is_meant(slurm, tmp_path):
    path = tmp_path / "file.sbatch"
    path.write_text(mended_job().replace("gpus-per-node=4", "gpus-per-node=2").replace("64G", "1G"))
    job = shown(slurm, path)
    assert job["JobName"] == "hello" and job["NumNodes"].split("-")[0] == "2"
    assert job["NumTasks"] == "2" and job["NtasksPerN:B:S:C"].split(":")[0] == "1"
    assert job["TresPerNode"].endswith("gpu:2")
    assert minutes(job["TimeLimit"]) == 90
    assert job["StdOut"] == f"{tmp_path}/hello-{job['id']}.out"
    assert job["StdErr"] == f"{tmp_path}/hello-{job['id']}.err"


def test_slurm_accepts_the_broken_file_and_reads_its_faults(slurm, tmp_path):
    path = tmp_path / "broken.sbatch"
    path.write_text(BROKEN)
    job = shown(slurm, path)
    assert minutes(job["TimeLimit"]) == 2 and job["NumTasks"] == "8"
    assert job["TresPerNode"].endswith("gpu:1") and job["StdErr"] == job["StdOut"]
    assert job["StdOut"] == f"{tmp_path}/logs/hello-{job['id']}.out"


HEADERS = """\
#SBATCH --nodes=2
# SBATCH --nodes=2
 #SBATCH --nodes=2
#SBATCH--nodes=2
#sbatch --nodes=2
#SBATCH --nodes=2 --time=20 # a comment
#SBATCH --nodes 2|#SBATCH -t20
#SBATCH -J name -N2 -n 2
#SBATCH -HN2
#SBATCH --tasks-per-node=1 --nodes=2
#SBATCH --nodes=2 \\|--time=20|#SBATCH --nodes=3
#SBATCH --nodes = 2
#SBATCH --nodes= 2
#SBATCH --nodes=2 three
#SBATCH nodes=2
#SBATCH --nodes=two
#SBATCH --nodes="2"
#SBATCH --nodes='2'
#SBATCH --nodes=3|#SBATCH --nodes=2
||# words|#SBATCH --nodes=2
echo|#SBATCH --nodes=2
#SBATCH --time=20
#SBATCH --time=20:00
#SBATCH --time=00:20
#SBATCH --time=1:30
#SBATCH --time=00:90:00
#SBATCH --time=23:59:00
#SBATCH --time=0-1
#SBATCH --time=0-1:30
#SBATCH --time=0-1:30:30
#SBATCH --time=00:20:00:00
#SBATCH --time=20m
#SBATCH --time=20.0
#SBATCH --time=$MINUTES
#SBATCH --gpus-per-n=3
#SBATCH --gpus-per-node=h100:3
#SBATCH --gres=gpu:3
#SBATCH --gpus-per-nodes=4
#SBATCH --gpu-per-node=4
#SBATCH --gpus_per_node=4
#SBATCH --requeue --exclusive --nodes=2
#SBATCH --open-mode=append --signal=B:USR1@120|#SBATCH --nodes=2
#SBATCH --output=%x-%j.out
#SBATCH --output=./%x_%A.txt
#SBATCH --output=%x-$SLURM_JOB_ID.out
#SBATCH --output="%x-%j.out"
#SBATCH --mem=1G --comment="two words" --nodes=2
""".splitlines()


@pytest.fixture(scope="module")
def slurms_reading(slurm, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Of each header: what Slurm makes of it; nothing where it refuses the file."""
    folder, found = tmp_path_factory.mktemp("jobs"), {}
    for number, header in enumerate(HEADERS):
        path = folder / f"{number}.sbatch"
        path.write_text("#!/bin/bash\n" + header.replace("|", "\n") + "\ntrue\n")
        try:
            found[header] = shown(slurm, path)
        except RuntimeError as refused:
            assert "sbatch" in str(refused)
            found[header] = {}
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_the_check_reads_a_job_file_as_slurm_does(slurms_reading, header):
    slurms = slurms_reading[header]
    try:
        options, _ = directives.read_directives(
            "#!/bin/bash\n" + header.replace("|", "\n") + "\ntrue\n"
        )
        refused = "time" in options and directives.minutes_of(options["time"]) is None
        refused = refused or not re.fullmatch(r"\d+", options.get("nodes", "1"))
    except Wrong:
        refused = True
    assert refused == (not slurms), slurms
    if refused:
        return
    assert options.get("nodes", "1") == slurms["NumNodes"].split("-")[0]
    if "time" in options:
        assert directives.minutes_of(options["time"]) == minutes(slurms["TimeLimit"])
    gpus = options.get("gpus-per-node", options.get("gres", "gpu:0")).split(":")[-1]
    assert slurms.get("TresPerNode", "gpu:0").split(":")[-1] == gpus
    written = directives.file_name(options.get("output", "slurm-%j.out"), slurms["JobName"])
    assert Path(slurms["StdOut"]).name == written.replace("4711", slurms["id"])


@pytest.fixture
def site(slurm, tmp_path, monkeypatch) -> Path:
    """A folder on PATH with an sbatch and a scontrol that speak to the cluster."""
    for name in ("sbatch", "scontrol"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        command = shlex.join([str(SCRIPT), "run", str(slurm.dir), shutil.which(name)])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return tmp_path / "bin"


EXERCISE = check.lesson.exercises["0.4"]
ONE_LINE_MORE = job_with("#SBATCH --nodes", "#SBATCH --constraint=nosuch\n#SBATCH --nodes")


def test_where_slurm_answers_the_check_asks_it(site):
    assert judge(EXERCISE, mended_job).state == "done"
    told = judge(EXERCISE, ONE_LINE_MORE)
    assert told.state == "not yet" and "sbatch --test-only refuses the file: " in told.seen
    assert "nvalid feature" in told.seen and "\n" not in repr(told)


def test_what_a_site_refuses_of_everybody_is_no_mistake(site, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "nosuch")
    assert judge(EXERCISE, mended_job).state == judge(EXERCISE, ONE_LINE_MORE).state == "done"


def test_without_an_answer_of_slurm_the_check_goes_on(site):
    (site / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    start = time.monotonic()
    assert judge(EXERCISE, ONE_LINE_MORE).state == "done"
    assert time.monotonic() - start < 20
    (site / "scontrol").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    assert judge(EXERCISE, ONE_LINE_MORE).state == "done"


# ---- the site file -------------------------------------------------------------------------------


def test_the_site_file_says_what_the_site_shows():
    text = 'module() { echo "$*"; }\n' + site_file() + "\nenv"
    said = bash(text).splitlines()
    assert said[0] in ("load Python/3.12 CUDA/12.8", "load CUDA/12.8 Python/3.12")
    for name, value in site_rules.TRUTH.items():
        assert f"{name}={value}" in said
        assert value in SITE
    assert len(site_file().splitlines()) == 6
    gpu = next(line.split() for line in SITE.splitlines() if line.startswith("gpu "))
    assert gpu[3] == "gpu:h100:" + site_rules.TRUTH["SBATCH_GPUS_PER_NODE"]


def test_the_site_file_is_read_without_the_users_own_environment(monkeypatch, tmp_path):
    start_file = tmp_path / "start"
    start_file.write_text("export SBATCH_ACCOUNT=class\n")
    monkeypatch.setenv("BASH_ENV", str(start_file))
    for name, value in site_rules.TRUTH.items():
        monkeypatch.setenv(name, value)
    told = judge(check.lesson.exercises["0.6"], lambda: "module load Python CUDA\n")
    assert "SBATCH_ACCOUNT is not set" in told.seen


# ---- what was used -------------------------------------------------------------------------------


def test_hours_of_hand_made_jobs():
    assert device_hours([[1.0, 1.0]], 8, 1800) == (4.0, 0.5)  # the question at the lesson's end
    assert device_hours([[0.5], [0.5, 1.0, 0.0]], 2, 7200) == (4.0, 2.0)
    assert device_hours([[], [1.0]], 4, 3600) == (4.0, 1.0)
    assert device_hours([], 4, 900) == (1.0, 0.0)


def test_hours_are_an_area_under_the_samples():
    draw = np.random.default_rng(2)
    samples = draw.uniform(0, 1, (3, 50))
    charged, used = device_hours(samples.tolist(), 5, 25.0)
    assert charged == pytest.approx(5 * 25 / 3600)
    assert used == pytest.approx(samples.sum() * 0.5 / 3600)  # 50 samples, half a second apart
