"""Answers to lesson 00: RIGHT ones of another shape than the course's own, and WRONG ones that are
no slip of it, with words of their verdict."""

import math
import socket
import time
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from manyhands.first_job import job_text, planning, site
from manyhands.first_job.places import Place

RIGHT: dict[str, list] = {"0.4": [job_text.mended_job], "0.6": [site.site_file]}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


# ---- 0.1 device_map -------------------------------------------------------------------------


def place_of(environ, num_gpus, host):
    local = int(environ["LOCAL_RANK"])
    enough = num_gpus >= int(environ["LOCAL_WORLD_SIZE"])
    return Place(int(environ["RANK"]), host, local, f"cuda:{local}" if enough else "cpu")


def gathered(mine):
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    return places


def map_of_parts(environ, num_gpus, host):
    numbers = [int(environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    parts = gathered((*numbers, host, num_gpus))
    return [
        Place(rank, host, local, "cpu" if gpus < processes else f"cuda:{local}")
        for rank, local, processes, host, gpus in parts
    ]


def map_by_broadcasts(environ, num_gpus, host):
    places = []
    for source in range(dist.get_world_size()):
        box = [place_of(environ, num_gpus, host)]
        dist.broadcast_object_list(box, src=source)
        places += box
    return places


def map_from_rank_0(environ, num_gpus, host):
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    places = [None] * size
    mine = place_of(environ, num_gpus, host)
    dist.gather_object(mine, places if is_first else None, dst=0)
    dist.broadcast_object_list(places, src=0)
    return sorted(places)


def map_with_this_machine(environ, num_gpus, host):
    return gathered(place_of(environ, num_gpus, socket.gethostname()))


def map_of_text(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return gathered(mine._replace(rank=environ["RANK"]))


def map_of_tuples(environ, num_gpus, host):
    return gathered(tuple(place_of(environ, num_gpus, host)))


def map_on_rank_0(environ, num_gpus, host):
    places = gathered(place_of(environ, num_gpus, host))
    return places if dist.get_rank() == 0 else None


# ---- 0.2 prepare_once -----------------------------------------------------------------------


def once_with_two_meetings(prepare, read, place, is_shared):
    problem = None
    if place.rank == 0 or (not is_shared and place.local_rank == 0):
        try:
            prepare()
        except Exception as error:
            problem = error
    dist.barrier()
    failed = torch.tensor(float(problem is not None))
    dist.all_reduce(failed)
    if problem is not None:
        raise problem
    if failed > 0:
        raise RuntimeError("another rank could not prepare the data")
    return read()


def once_by_broadcasts(prepare, read, place, is_shared):
    own = None
    if {True: place.rank, False: place.local_rank}[is_shared] == 0:
        try:
            prepare()
        except Exception as error:
            own = f"{error!r}"
    for source in range(dist.get_world_size()):
        told = [own]
        dist.broadcast_object_list(told, src=source)
        if told[0] is not None:
            raise OSError(own or told[0])
    return read()


def once_as_on_a_slide(prepare, read, place, is_shared):
    if place.local_rank == 0:
        prepare()
        data = read()
    return data


def once_with_a_barrier(prepare, read, place, is_shared):
    """Right, until prepare() fails."""
    if place.rank == 0 if is_shared else place.local_rank == 0:
        prepare()
    dist.barrier()
    return read()


def once_sent_to_all(prepare, read, place, is_shared):
    box = [None, None]
    if place.rank == 0 if is_shared else place.local_rank == 0:
        try:
            prepare()
        except Exception as error:
            box[1] = str(error)
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, box[1])
    if any(boxes):
        raise RuntimeError(str(boxes))
    if place.rank == 0:
        box[0] = read()
    dist.broadcast_object_list(box, src=0)
    return box[0]


def once_by_waiting_a_little(prepare, read, place, is_shared):
    time.sleep(0.0 if place.rank == 0 else 0.01)
    if place.rank == 0:
        prepare()
    return read()


# ---- 0.3 fit_power_law ----------------------------------------------------------------------


def fit_with_numpy(sizes, errors):
    slope, intercept = np.polyfit(np.log10(sizes), np.log10(errors), 1)
    return np.array([10**intercept, -slope])


def fit_in_32_bits(sizes, errors):
    x, y = torch.tensor(sizes).log2(), torch.tensor(errors).log2()
    matrix = torch.stack([torch.ones(len(x)), x], dim=1)
    intercept, slope = torch.linalg.lstsq(matrix, y[:, None]).solution[:, 0]
    return 2**intercept, -slope


def fit_by_a_search(sizes, errors):
    a, b = fit_with_numpy(sizes, errors)
    return 1.02 * a, 1.004 * b  # where steps of gradient descent leave it


def fit_of_plain_errors(sizes, errors):
    """Gauss-Newton steps to the least squares of the error itself."""
    a, b = fit_with_numpy(sizes, errors)
    size, error = np.array(sizes, float), np.array(errors, float)
    for _ in range(50):
        rows = np.stack([size**-b, -a * np.log(size) * size**-b], axis=1)
        change = np.linalg.lstsq(rows, error - a * size**-b, rcond=None)[0]
        a, b = a + 0.5 * change[0], b + 0.5 * change[1]
    return a, b


def fit_of_spreads(sizes, errors):
    x, y = np.log(sizes), np.log(errors)
    slope = -y.std() / x.std()
    return math.exp(y.mean() - slope * x.mean()), -slope


# ---- 0.4 mended_job -------------------------------------------------------------------------


@right("0.4")
def job_in_short():
    return """#!/usr/bin/env bash
# written by hand
#SBATCH -J hello -N2
#SBATCH --gres=gpu:h100:4 --mem-per-gpu=16G
#SBATCH -t 90
#SBATCH -o ./%x-%j.out -e "%x-%j.err"
##SBATCH --mem=64
set -euo pipefail
source .venv/bin/activate
module load CUDA
export MASTER_ADDR=$(hostname) MASTER_PORT=$((SLURM_JOB_ID % 50000 + 10000))
srun --ntasks-per-node=1 --kill-on-bad-exit torchrun --nnodes $SLURM_NNODES \\
    --nproc_per_node gpu --rdzv_backend c10d --rdzv_id $SLURM_JOB_ID \\
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT train.py"""


@right("0.4")
def job_of_numbered_nodes():
    return """#!/bin/bash -l
#SBATCH --nodes=2-2 --ntasks=2 --ntasks-per-node=1 --gpus-per-task=4
#SBATCH --mem=65536 --time=0-1:30 --output=hello-%j.out --error=hello-%j.err

export PORT=$(python3 -c "import os; print(15000 + int(os.environ['SLURM_JOB_ID']) % 9999)")
export HEAD=$(scontrol show hostname $SLURM_NODELIST | head -1)
srun bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID \\
    --master-addr=$HEAD --master-port=$PORT ./train.py'
"""


def job_with(*pairs):
    """The course's mended file, with pieces of text in place of others."""

    def answer():
        text = job_text.mended_job()
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            assert old in text, old
            text = text.replace(old, new)
        return text

    return answer


def job_indented():
    return job_text.mended_job().replace("\n", "\n    ")


def job_that_cuts_the_list():
    asked = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    return job_text.mended_job().replace(asked, "head=${SLURM_JOB_NODELIST%%,*}")


WRONG["0.4"] += [
    (job_that_cuts_the_list, "nobody listens at"),
    (lambda: job_text.BROKEN, "faults are left, this is the first"),
    (lambda: print(job_text.mended_job()), "Return the text; do not print or write it."),
    (lambda: job_text.mended_job().replace("\n", "\r\n"), "lines end with \\r\\n"),
    (lambda: "\n" + job_text.mended_job(), "also the line break and the spaces before #!"),
    (job_indented, "begins with a space, so Slurm takes it for a comment"),
    (job_with("#SBATCH --nodes", "# SBATCH --nodes"), "'# SBATCH' is a comment to Slurm"),
    (job_with("#SBATCH --nodes", "set -e\n#SBATCH --nodes"), "the first command, which is"),
    (job_with("--nodes=2\n", "--nodes = 2\n"), "without spaces around ="),
    (job_with("--gpus-per-node", "--gpu-per-node"), "it has no option --gpu-per-node"),
    (job_with("gpus-per-node=4", "gpus-per-node=8"), "gives 8 of the GPUs of each node"),
    (job_with("--gpus-per-node=4", "--gpus=8"), "counts over the whole job"),
    (job_with("64G", "64MB"), "--mem=64MB is 64 MB"),
    (job_with("=01:30:00", "=5400"), "That is seconds, but one number is minutes"),
    (job_with("=01:30:00", "=1.5h"), "sbatch refuses --time=1.5h"),
    (job_with("%x-%j.err", "logs/%x-%j.err"), "Slurm makes no folders"),
    (job_with("#SBATCH --error=%x-%j.err\n", ""), "among all that the ranks print"),
    (job_with("srun ", "mpirun "), "nothing is started; bash says"),
    (job_with("srun torchrun", "srun --ntasks-per-node=4 torchrun"), "torchrun starts 4 times"),
    (
        job_with("srun torchrun", "srun python", "--ntasks-per-node=1", "--ntasks-per-node=4"),
        "without torchrun",
    ),
    (job_with("$head:$port", "$head"), "both use port 29400"),
    (job_with("$head:$port", "localhost:$port"), "that is the node itself"),
    (job_with("head -n 1", "tail -n 1"), "the first one, is where torchrun listens"),
    (job_with("=c10d", "=static"), "the numbers of the nodes are 0, 0"),
    (
        job_with("srun ", "srun bash -c '", "$head:", "$(hostname):", "n.py", "n.py'"),
        "Work it out once, before srun",
    ),
    (job_with(" train.py", ""), "torchrun is not given train.py"),
]


# ---- 0.6 site_file --------------------------------------------------------------------------


@right("0.6")
def site_in_short():
    return (
        "# our site\n"
        "export SBATCH_ACCOUNT='class' SBATCH_PARTITION=\"gpu\"\n"
        "SBATCH_GPUS_PER_NODE=4; NCCL_SOCKET_IFNAME=ib0\n"
        "export SBATCH_GPUS_PER_NODE NCCL_SOCKET_IFNAME\n"
        "declare -x HEAD_SUFFIX=-ib  # of g14-ib\n"
        "module purge\nmodule load CUDA/12.8\nmodule load Python/3.12"
    )


@right("0.6")
def site_of_a_table():
    values = {
        "SBATCH_ACCOUNT": "class",
        "SBATCH_PARTITION": "gpu",
        "SBATCH_GPUS_PER_NODE": 4,
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=$GLOO_SOCKET_IFNAME",
        "HEAD_SUFFIX": "-ib",
    }
    lines = [f"export {name}={value}" for name, value in values.items()]
    return "\n".join(["#!/bin/bash", *lines, "ml CUDA Python"]) + "\n"


def site_with(old, new):
    """The course's file, with one piece of text in place of another."""

    def answer():
        assert old in site.site_file(), old
        return site.site_file().replace(old, new)

    return answer


PARTITION, GPUS = "SBATCH_PARTITION=gpu", "GPUS_PER_NODE=4"
LOAD = "module load Python/3.12 CUDA/12.8"
WRONG["0.6"] += [
    (site_with("export HEAD", "set HEAD"), "`set` gives bash arguments"),
    (site_with("export SBATCH_ACC", "#SBATCH --acc\nexport A="), "#SBATCH lines are for job files"),
    (site_with(GPUS, "GPUS_PER_NODE=h100"), "h100 is the kind of GPU"),
    (site_with("ib0", "InfiniBand"), "the kind of network"),
    (site_with("=-ib", "=$(uname -n)-ib"), "one node's whole name"),
    (site_with("COUNT=class", "COUNT = class"), "bash allows no space around ="),
    (site_with("COUNT=class", "COUNT= class"), "bash allows no space around it"),
    (
        site_with("export SBATCH_ACCOUNT", "SBATCH_ACCOUNT"),
        "sbatch receives only exported variables",
    ),
    (site_with("=class", "=home"), "may use the partition cpu only"),
    (site_with("=class", "=$USER"), "That is your own name"),
    (site_with("=class", "=\u201cclass\u201d"), "such as a curly quote"),
    (site_with("SBATCH_ACCOUNT", "SBATCH_ACOUNT"), "The file sets SBATCH_ACOUNT"),
    (site_with(PARTITION, "SBATCH_PARTITION=cpu"), "The column GRES shows (null)"),
    (site_with(PARTITION, "SBATCH_PARTITION=gpu-test"), "ends every job after 30 minutes"),
    (site_with("ib0", "eth0"), "training would wait for gradients"),
    (site_with("ib0", "10.2.0.14"), "Every node has another address"),
    (site_with("=-ib", "=ib"), "which is no node's name"),
    (site_with(LOAD, "module load python/3.12 cuda/12.8"), "python/3.12 is not in the list"),
    (site_with(LOAD, LOAD + " PyTorch"), "there is no PyTorch"),
    (site_with("export ", "setenv "), "setenv belongs to another shell"),
    (site_with("\n", "\r\n"), "lines end with \\r\\n"),
    (site_with("export ", "exit 1; export "), "ends the shell that reads it"),
    (site_with(LOAD, LOAD + "\nexport SBATCH_TIMELIMIT=1-0"), "overrules that line"),
    (lambda: {"SBATCH_ACCOUNT": "class"}, "Return six lines as one text."),
    (lambda: print(site.site_file()), "Return six lines as one text."),
]


# ---- 0.5 device_hours -----------------------------------------------------------------------


def hours_with_numpy(busy, num_granted, seconds):
    used = np.sum([np.mean(samples) if len(samples) else 0 for samples in busy])
    return seconds * num_granted / 3600, used * seconds / 3600


def hours_of_each_device(busy, num_granted, seconds):
    used = 0.0
    for samples in busy:
        for sample in samples:
            used += sample * seconds / len(samples)
    return [num_granted * (seconds / 3600), used / 3600]


def hours_without_idle_ranks(busy, num_granted, seconds):
    for samples in busy:
        if not samples:
            busy.remove(samples)
    return num_granted * seconds / 3600, sum(map(fmean, busy)) * seconds / 3600


def hours_of_a_table(busy, num_granted, seconds):
    return num_granted * seconds / 3600, torch.tensor(busy).mean(1).sum().item() * seconds / 3600


def used_alone(busy, num_granted, seconds):
    return planning.device_hours(busy, num_granted, seconds)[1]


def fit_by_lbfgs(sizes, errors):
    """torch's own optimizer; its first step imports much and sets variables."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, errors))
    line = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # height in the middle, slope
    optimizer = torch.optim.LBFGS([line], max_iter=200, tolerance_grad=1e-14, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = (line[0] + line[1] * (x - x.mean()) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    middle, slope = line.tolist()
    return math.exp(middle - slope * x.mean().item()), -slope


RIGHT |= {
    "0.1": [map_of_parts, map_by_broadcasts, map_from_rank_0],
    "0.2": [once_with_two_meetings, once_by_broadcasts],
    "0.3": [fit_with_numpy, fit_in_32_bits, fit_by_lbfgs],
    "0.5": [hours_with_numpy, hours_of_each_device],
}
WRONG |= {
    "0.1": [
        (map_with_this_machine, ""),
        (map_of_text, "Environment variables are text"),
        (map_of_tuples, "a Place in every element"),
        (map_on_rank_0, "gives None"),
    ],
    "0.2": [
        (once_as_on_a_slide, "the other ranks use it as well"),
        (once_with_a_barrier, "while others still wait"),
        (once_sent_to_all, "calls of read() on this rank"),
        (once_by_waiting_a_little, "A rank reads before the data is prepared"),
    ],
    "0.3": [
        (fit_by_a_search, "the least possible is"),
        (fit_of_plain_errors, "the least possible is"),
        (fit_of_spreads, "the least possible is"),
    ],
    "0.5": [
        (hours_without_idle_ranks, "the caller's `busy` has changed"),
        (hours_of_a_table, "they make no table"),
        (used_alone, "asks for two numbers"),
    ],
}
