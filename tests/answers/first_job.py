"""Answers to lesson 00: RIGHT ones of another shape than the course's own, and WRONG ones that are
no slip of it, with words of their verdict."""

import itertools
import math
import socket
import textwrap
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from manyhands.first_job import planning
from manyhands.first_job.planning import Place

RIGHT: dict[str, list] = {"0.5": [planning.job_file], "0.6": [planning.site_file]}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


# ---- 0.1 days_on_devices --------------------------------------------------------------------


def days_by_operations(petaflops_days, num_devices, peak_tflops, utilisation):
    operations = petaflops_days * 1e15 * 86400
    per_second = num_devices * peak_tflops * 1e12 * utilisation
    return operations / per_second / 86400


def days_in_32_bits(petaflops_days, num_devices, peak_tflops, utilisation):
    return torch.tensor(1000 * petaflops_days) / (num_devices * peak_tflops * utilisation)


def days_as_text(petaflops_days, num_devices, peak_tflops, utilisation):
    return f"{planning.days_on_devices(petaflops_days, num_devices, peak_tflops, utilisation)} days"


# ---- 0.2 device_map -------------------------------------------------------------------------


def place_of(environ, num_gpus, host):
    local = int(environ["LOCAL_RANK"])
    enough = num_gpus >= int(environ["LOCAL_WORLD_SIZE"])
    return Place(int(environ["RANK"]), host, local, f"cuda:{local}" if enough else "cpu")


def gathered(mine, group=None):
    places = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, mine, group=group)
    return places


def map_of_parts(environ, num_gpus, host, group=None):
    numbers = [int(environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    parts = gathered((*numbers, host, num_gpus), group)
    return [
        Place(rank, host, local, "cpu" if gpus < processes else f"cuda:{local}")
        for rank, local, processes, host, gpus in parts
    ]


def map_by_broadcasts(environ, num_gpus, host, group=None):
    places = []
    for source in range(dist.get_world_size(group)):
        box = [place_of(environ, num_gpus, host)]
        dist.broadcast_object_list(box, group=group, group_src=source)
        places += box
    return places


def map_from_rank_0(environ, num_gpus, host, group=None):
    size, is_first = dist.get_world_size(group), dist.get_rank(group) == 0
    places = [None] * size
    mine = place_of(environ, num_gpus, host)
    dist.gather_object(mine, places if is_first else None, group=group, group_dst=0)
    dist.broadcast_object_list(places, group=group, group_src=0)
    return sorted(places)


def map_with_short_names(environ, num_gpus, host, group=None):
    return gathered(place_of(environ, num_gpus, host[:4]), group)


def map_with_this_machine(environ, num_gpus, host, group=None):
    return gathered(place_of(environ, num_gpus, socket.gethostname()), group)


def map_of_text(environ, num_gpus, host, group=None):
    mine = place_of(environ, num_gpus, host)
    return gathered(mine._replace(rank=environ["RANK"]), group)


def map_of_tuples(environ, num_gpus, host, group=None):
    return gathered(tuple(place_of(environ, num_gpus, host)), group)


def map_on_rank_0(environ, num_gpus, host, group=None):
    places = gathered(place_of(environ, num_gpus, host), group)
    return places if dist.get_rank(group) == 0 else None


# ---- 0.3 my_share ---------------------------------------------------------------------------


def share_by_position(tasks, rank, world_size):
    return [task for position, task in enumerate(tasks) if position % world_size == rank]


def share_like_cards(tasks, rank, world_size):
    hands = [[] for _ in range(world_size)]
    for position, task in enumerate(tasks):
        hands[position % world_size].append(task)
    return hands[rank]


def share_that_empties_the_list(tasks, rank, world_size):
    mine = list(tasks[rank::world_size])
    if isinstance(tasks, list):
        tasks.clear()
    return mine


def share_as_generator(tasks, rank, world_size):
    return (task for task in tasks[rank::world_size])


def share_of_three(tasks, rank, world_size):
    return list(itertools.islice(tasks, rank, 3 * world_size, world_size))


# ---- 0.4 fit_power_law ----------------------------------------------------------------------


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


# ---- 0.5 job_file ---------------------------------------------------------------------------


@right("0.5")
def job_of_lines(name, nodes, gpus_per_node, minutes, command):
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH -J {name}",
            f"#SBATCH -N{nodes} -n {nodes}  # one torchrun a node",
            f"#SBATCH --gres=gpu:{gpus_per_node}",
            f"#SBATCH -t {minutes}",
            f'#SBATCH -o "{name}-%j.out"',
            "",
            command,
        ]
    )


@right("0.5")
def job_dedented(name, nodes, gpus_per_node, minutes, command):
    days, rest = divmod(minutes, 1440)
    text = f"""
        #!/usr/bin/env bash
        # written by hand
        #SBATCH --job-name={name}
        #SBATCH --nodes={nodes}-{nodes}
        #SBATCH --ntasks-per-node 1
        #SBATCH --gpus-per-node={gpus_per_node}
        #SBATCH --time={days}-{rest // 60}:{rest % 60}
        #SBATCH --output=./%x-%j.out
        #SBATCH --requeue --open-mode=append
        ##SBATCH --mem=10G

        set -e
        """
    return textwrap.dedent(text).lstrip() + command + "\n"


@right("0.5")
def job_of_tasks(name, nodes, gpus_per_node, minutes, command):
    options = {
        "job-name": name,
        "ntasks": nodes,
        "ntasks-per-node": 1,
        "gpus-per-task": gpus_per_node,
        "time": f"00:{minutes}:00",
        "output": "%x-%j.out",
    }
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items()]
    return "\n".join(["#!/bin/bash -l", *lines, "module list", command])


def job_with(old, new):
    """The course's job file, with one piece of text in place of another."""

    def answer(name, nodes, gpus_per_node, minutes, command):
        call = {"name": name, "nodes": nodes, "gpus": gpus_per_node, "minutes": minutes}
        text = planning.job_file(name, nodes, gpus_per_node, minutes, command)
        before = old.format(**call, time=f"{minutes // 60:02}:{minutes % 60:02}:00")
        assert before in text, before
        hours, rest = divmod(minutes, 60)
        more = {"hours": hours, "rest": rest, "all": nodes * gpus_per_node, "part": minutes / 60}
        return text.replace(before, new.format(**call, **more, seconds=60 * minutes))

    return answer


def command_with(form):
    def answer(name, nodes, gpus_per_node, minutes, command):
        text = planning.job_file(name, nodes, gpus_per_node, minutes, "COMMAND")
        return text.replace("COMMAND", form(command))

    return answer


def job_after(change):
    return lambda *call: change(planning.job_file(*call))


def job_with_the_command_first(name, nodes, gpus_per_node, minutes, command):
    first, *rest = planning.job_file(name, nodes, gpus_per_node, minutes, command).split("\n")
    return "\n".join([first, "set -euo pipefail", *rest])


def job_without_f(name, nodes, gpus_per_node, minutes, command):
    return """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
"""


def job_indented(name, nodes, gpus_per_node, minutes, command):
    return f"""#!/bin/bash
    #SBATCH --job-name={name}
    #SBATCH --nodes={nodes}
    #SBATCH --ntasks-per-node=1
    #SBATCH --gpus-per-node={gpus_per_node}
    #SBATCH --time={minutes}
    #SBATCH --output=%x-%j.out
    {command}
    """


TIME = "--time={time}"
WRONG["0.5"] += [
    (job_with("--nodes", "-nodes"), "two dashes: --nodes=2"),
    (job_with("%x-%j.out", "<name>-<job number>.out"), "<...> stands for something"),
    (job_after(lambda text: text.replace("#SBATCH", "##SBATCH")), "'##SBATCH' is a comment"),
    (job_after(lambda text: text.replace("#SBATCH", "SBATCH")), "'SBATCH' is no option"),
    (job_after(lambda text: text.replace("\n", "")), "Nothing breaks the lines"),
    (command_with(lambda command: f"exec {command}"), "what to run is for the caller to say"),
    (job_with("#SBATCH --nodes", "# SBATCH --nodes"), "'# SBATCH' is a comment to Slurm"),
    (job_indented, "begins with a space, so Slurm takes it for a comment"),
    (job_with_the_command_first, "the first command, which is 'set -euo pipefail'"),
    (job_after(lambda text: "\n" + text), "also the line break and the spaces before #!"),
    (job_after(lambda text: text.replace("\n", "\r\n")), "lines end with \\r\\n"),
    (job_without_f, "Put an f before the quotes"),
    (job_with("ntasks-per-node=1", "ntasks-per-node={gpus}"), "16 processes per node"),
    (job_with("--ntasks-per-node=1", "--ntasks=1"), "A node without a task is not given"),
    (job_with("--ntasks-per-node=1", "--ntasks={all}"), "Slurm would start 4 tasks"),
    (job_with("--gpus-per-node={gpus}", "--gpus={all}"), "counts over the whole job"),
    (job_with("--gpus-per-node={gpus}", "--gpus-per-node={all}"), "what all 2 nodes have together"),
    (job_with("--gpus-per-node", "--gpu-per-node"), "it has no option --gpu-per-node"),
    (job_with("#SBATCH --nodes={nodes}\n", ""), "--nodes is missing"),
    (job_with("--nodes={nodes}", "--nodes=$NODES"), "which knows no variables of the shell"),
    (job_with("--nodes={nodes}", "--nodes = {nodes}"), "without spaces around ="),
    (job_with(TIME, "--time={hours:02}:{rest:02}"), "two numbers as minutes and seconds"),
    (job_with(TIME, "--time={seconds}"), "That is seconds, but one number is minutes"),
    (job_with("%x-%j.out", "logs/%x-%j.out"), "Slurm makes no folders"),
    (job_with("%x-%j.out", "%%x-%%j.out"), "needs no doubling"),
    (command_with(lambda command: ""), "no line holds the command"),
    (command_with(lambda command: f"srun {command}"), "it brings its own srun"),
    (command_with(lambda command: f"{command}\necho done"), "it counts as completed"),
    (job_after(print), "Return the text; do not print or write it."),
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
        assert old in planning.site_file(), old
        return planning.site_file().replace(old, new)

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
    (lambda: print(planning.site_file()), "Return six lines as one text."),
]


# ---- 0.7 device_hours -----------------------------------------------------------------------


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


RIGHT |= {
    "0.1": [days_by_operations, days_in_32_bits],
    "0.2": [map_of_parts, map_by_broadcasts, map_from_rank_0],
    "0.3": [share_by_position, share_like_cards],
    "0.4": [fit_with_numpy, fit_in_32_bits],
    "0.7": [hours_with_numpy, hours_of_each_device],
}
WRONG |= {
    "0.1": [(days_as_text, "asks for a number")],
    "0.2": [
        (map_with_short_names, "matches none of the mistakes"),
        (map_with_this_machine, ""),
        (map_of_text, "Environment variables are text"),
        (map_of_tuples, "a Place in every element"),
        (map_on_rank_0, "gives None"),
    ],
    "0.3": [
        (share_that_empties_the_list, "the caller's `tasks` has changed"),
        (share_as_generator, "a generator"),
        (share_of_three, "The share has"),
    ],
    "0.4": [
        (fit_by_a_search, "the least possible is"),
        (fit_of_plain_errors, "the least possible is"),
        (fit_of_spreads, "the least possible is"),
    ],
    "0.7": [
        (hours_without_idle_ranks, "the caller's `busy` has changed"),
        (hours_of_a_table, "they make no table"),
        (used_alone, "asks for two numbers"),
    ],
}
