"""Answers to lesson 00 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import math
import os
import random
import socket
import textwrap
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from manyhands.first_job import planning, power_law
from manyhands.first_job.planning import Place

RIGHT: dict[str, list] = {
    "0.1": [planning.days_on_devices],
    "0.2": [planning.device_map],
    "0.3": [planning.my_share],
    "0.4": [power_law.fit_power_law],
    "0.5": [planning.job_file],
    "0.6": [planning.site_file],
    "0.7": [planning.device_hours],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 0.1 days_on_devices --------------------------------------------------------------------


@right("0.1")
def days_by_operations(petaflops_days, num_devices, peak_tflops, utilisation):
    operations = petaflops_days * 1e15 * 86400
    per_second = num_devices * peak_tflops * 1e12 * utilisation
    return operations / per_second / 86400


@right("0.1")
def days_with_numpy(petaflops_days, num_devices, peak_tflops, utilisation):
    return np.float64(1000 * petaflops_days) / np.prod([num_devices, peak_tflops, utilisation])


@right("0.1")
def days_in_32_bits(petaflops_days, num_devices, peak_tflops, utilisation):
    return torch.tensor(1000 * petaflops_days) / (num_devices * peak_tflops * utilisation)


WRONG["0.1"] += [
    (lambda w, n, p, u: w / (n * p * u), "a factor of 1,000: peak_tflops counts 1e12"),
    (lambda w, n, p, u: w * 1e15 / (n * p * 1e12 * u) / 86400, "already the work of a whole day"),
    (lambda w, n, p, u: w / 24 / (n * p * u), "a PF/s 1e15; and a factor of 24"),
    (lambda w, n, p, u: w / (n * p / 1024 * u), "count in 1000"),
    (lambda w, n, p, u: w / n * p / 1000 * u, "the whole speed in brackets"),
    (lambda w, n, p, u: w / (n * p / 1000), "`utilisation` is left out"),
    (lambda w, n, p, u: w / (n * p / 1000) * u, "multiply the speed by it, not the days"),
    (lambda w, n, p, u: w / (n * p / 1000 * u / 100), "not a percentage"),
    (lambda w, n, p, u: w / (p / 1000 * u), "the devices are left out"),
    (lambda w, n, p, u: w * n / (p / 1000 * u), "divide by num_devices"),
    (lambda w, n, p, u: math.ceil(w / (n * p / 1000 * u)), "the days were rounded"),
    (lambda w, n, p, u: round(w / (n * p / 1000 * u), 2), "the days were rounded"),
    (lambda w, n, p, u: f"{w / (n * p / 1000 * u):.1f} days", "that is no number"),
]


# ---- 0.2 device_map -------------------------------------------------------------------------


def place_of(environ, num_gpus, host, **changes):
    local = int(environ["LOCAL_RANK"])
    enough = num_gpus >= int(environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local}" if enough else "cpu"
    return Place(int(environ["RANK"]), host, local, device)._replace(**changes)


def gathered(mine, group=None):
    places = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, mine, group=group)
    return places


def map_with(make):
    """A map whose every place is what `make` makes of environ, num_gpus and host."""

    def answer(environ, num_gpus, host, group=None):
        return gathered(make(environ, num_gpus, host), group)

    answer.__name__ = getattr(make, "__name__", "answer")
    return answer


@right("0.2")
def map_of_parts(environ, num_gpus, host, group=None):
    numbers = [int(environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    parts = gathered((*numbers, host, num_gpus), group)
    return [
        Place(rank, host, local, "cpu" if gpus < processes else f"cuda:{local}")
        for rank, local, processes, host, gpus in parts
    ]


@right("0.2")
def map_by_broadcasts(environ, num_gpus, host, group=None):
    places = []
    for source in range(dist.get_world_size(group)):
        box = [place_of(environ, num_gpus, host)]
        dist.broadcast_object_list(box, group=group, group_src=source)
        places += box
    return places


@right("0.2")
def map_from_rank_0(environ, num_gpus, host, group=None):
    size, is_first = dist.get_world_size(group), dist.get_rank(group) == 0
    places = [None] * size
    mine = place_of(environ, num_gpus, host)
    dist.gather_object(mine, places if is_first else None, group=group, group_dst=0)
    dist.broadcast_object_list(places, group=group, group_src=0)
    return sorted(places)


@wrong("0.2", "each node counts its own GPUs from 0")
@map_with
def rank_as_device(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=mine.device and f"cuda:{mine.rank}") if num_gpus else mine


@wrong("0.2", "it does not follow from RANK")
@map_with
def local_rank_from_rank(environ, num_gpus, host):
    local = int(environ["RANK"]) % int(environ["LOCAL_WORLD_SIZE"])
    return place_of(environ, num_gpus, host, local_rank=local)


@wrong("0.2", "environment variables are text")
@map_with
def place_of_text(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(rank=environ["RANK"], local_rank=environ["LOCAL_RANK"])


@wrong("0.2", "the device is asked for as a text")
@map_with
def device_as_object(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=torch.device(mine.device))


@wrong("0.2", "not from `environ`")
@map_with
def place_from_os_environ(environ, num_gpus, host):
    return place_of(os.environ, num_gpus, host)


@wrong("0.2", "the name of this rank's node is given")
@map_with
def host_of_this_machine(environ, num_gpus, host):
    return place_of(environ, num_gpus, socket.gethostname())


@wrong("0.2", "just enough for the 2 processes")
@map_with
def more_gpus_than_processes(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    enough = num_gpus > int(environ["LOCAL_WORLD_SIZE"])
    return mine._replace(device=mine.device if enough else "cpu")


@wrong("0.2", "4 processes cannot have a GPU each")
@map_with
def some_on_gpus(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=f"cuda:{mine.local_rank}" if mine.local_rank < num_gpus else "cpu")


@wrong("0.2", "all processes of the node would share one GPU")
@map_with
def all_on_gpu_0(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=mine.device.replace(f":{mine.local_rank}", ""))


@wrong("0.2", "in the order rank, host, local_rank, device")
@map_with
def parts_in_another_order(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return Place(mine.rank, mine.local_rank, mine.host, mine.device)


@wrong("0.2", "a rank knows its own environment only")
def map_of_oneself(environ, num_gpus, host, group=None):
    return [place_of(environ, num_gpus, host)]


@wrong("0.2", "ranks 1, 2 and 3 return None")
def map_on_rank_0(environ, num_gpus, host, group=None):
    places = gathered(place_of(environ, num_gpus, host), group)
    if dist.get_rank(group) == 0:
        return places


@wrong("0.2", "sorted by something else")
def map_by_host(environ, num_gpus, host, group=None):
    places = gathered(place_of(environ, num_gpus, host), group)
    return sorted(places, key=lambda place: place.host)


@wrong("0.2", "the list is shorter than the group")
def map_in_an_empty_list(environ, num_gpus, host, group=None):
    places = []
    dist.all_gather_object(places, place_of(environ, num_gpus, host), group=group)
    return places


@wrong("0.2", "None in it; the group has 2 ranks")
def map_as_long_as_the_job(environ, num_gpus, host, group=None):
    places = [None] * int(environ["WORLD_SIZE"])
    dist.all_gather_object(places, place_of(environ, num_gpus, host), group=group)
    return places


@wrong("0.2", "`group` is not passed on")
def map_without_group(environ, num_gpus, host, group=None):
    return gathered(place_of(environ, num_gpus, host))


@wrong("0.2", "not the number in the group")
def map_with_ranks_of_the_group(environ, num_gpus, host, group=None):
    return gathered(place_of(environ, num_gpus, host, rank=dist.get_rank(group)), group)


@wrong("0.2", "environment variables are text")
@map_with
def compares_text(environ, num_gpus, host):
    return "cuda" if num_gpus >= environ["LOCAL_WORLD_SIZE"] else "cpu"


@wrong("0.2", "not known on the other ranks")
def map_with_a_class_of_ones_own(environ, num_gpus, host, group=None):
    class Place:
        rank, host, local_rank, device = 0, "", 0, ""

    return gathered(Place(), group)


@wrong("0.2", "what this rank sends")
def map_that_sends_nothing(environ, num_gpus, host, group=None):
    return dist.all_gather_object(place_of(environ, num_gpus, host), group=group)


@wrong("0.2", "4 GPUs are more than enough")
@map_with
def as_many_gpus_as_processes(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    same = num_gpus == int(environ["LOCAL_WORLD_SIZE"])
    return mine._replace(device=f"cuda:{mine.local_rank}" if same else "cpu")


@wrong("0.2", "num_gpus does not decide")
@map_with
def device_without_num_gpus(environ, num_gpus, host):
    return place_of(environ, num_gpus, host, device="cpu")  # as torch.cuda says on many machines


@wrong("0.2", "nothing of the others was sent")
def map_of_copies(environ, num_gpus, host, group=None):
    return [place_of(environ, num_gpus, host)] * dist.get_world_size(group)


@wrong("0.2", "nothing of the others was sent")
def map_that_is_guessed(environ, num_gpus, host, group=None):
    return [Place(r, host, r, f"cuda:{r}") for r in range(dist.get_world_size(group))]


def map_by(send):
    """A map made by some call with what this rank sends, the list to fill, and the group."""

    def answer(environ, num_gpus, host, group=None):
        places = [None] * dist.get_world_size(group)
        send(place_of(environ, num_gpus, host), places, group)
        return places

    return answer


def gather_on_rank_0(mine, places, group):
    dist.gather_object(mine, None if dist.get_rank() else places, group=group)


WRONG["0.2"] += [
    (map_by(gather_on_rank_0), "gather_object fills a list on one rank only"),
    (map_by(lambda m, p, g: dist.gather_object(m, p, group=g)), "fills a list on one rank only"),
    (map_by(lambda m, p, g: dist.all_gather(p, m, group=g)), "all_gather sends tensors"),
    (map_by(lambda m, p, g: dist.all_gather_object(m, p, group=g)), "the list to fill comes first"),
    (map_by(lambda m, p, g: dist.init_process_group("gloo")), "leave out init_process_group"),
    (lambda *call, group=None: print(gathered(place_of(*call), group)), "end with `return places`"),
]


# ---- 0.3 my_share ---------------------------------------------------------------------------


@right("0.3")
def share_by_position(tasks, rank, world_size):
    return [task for position, task in enumerate(tasks) if position % world_size == rank]


@right("0.3")
def share_by_counting(tasks, rank, world_size):
    mine, position = [], rank
    while position < len(tasks):
        mine.append(tasks[position])
        position += world_size
    return mine


@right("0.3")
def share_like_cards(tasks, rank, world_size):
    hands = [[] for _ in range(world_size)]
    for position, task in enumerate(tasks):
        hands[position % world_size].append(task)
    return hands[rank]


def pieces(tasks, rank, world_size):
    size = math.ceil(len(tasks) / world_size)
    return list(tasks[rank * size : (rank + 1) * size])


def popped(tasks, rank, world_size):
    mine = list(tasks[rank::world_size])
    if isinstance(tasks, list):
        tasks.clear()
    return mine


def padded(tasks, rank, world_size):
    tasks = list(tasks)
    return (tasks + tasks[: -len(tasks) % world_size])[rank::world_size]


WRONG["0.3"] += [
    (pieces, "solid pieces"),
    (lambda t, r, n: [list(part) for part in np.array_split(t, n)][r], "or an array?"),
    (lambda t, r, n: list(t[r : r + len(t) // n]), "these pieces overlap"),
    (lambda t, r, n: (task for task in t[r::n]), "generator"),
    (lambda t, r, n: list(t[n::r]), "rank and world_size have changed places"),
    (lambda t, r, n: list(t[r + 1 :: n]), "the first task is done by nobody"),
    (lambda t, r, n: list(t[r::n])[::-1], "the order within the share"),
    (lambda t, r, n: list(t[: len(t) // n * n][r::n]), "the rest of the division was dropped"),
    (padded, "do not pad"),
    (lambda t, r, n: [task for task in t if list(t).index(task) % n == r], "go by the position"),
    (popped, "the caller's list was changed"),
    (lambda t, r, n: list(t[dist.get_rank() :: n]), "no message is needed"),
    (lambda t, r, n: [t[r::n]], "is there a list in the list"),
    (lambda t, r, n: list(t[r:n]), "two colons make steps"),
    (lambda t, r, n: list(t[r::2]), "the step is 2, and there are "),
    (lambda t, r, n: [r, r + n, r + 2 * n], "those are positions in the list"),
    (lambda t, r, n: [t[r], t[r + n], t[r + 2 * n]], "more than three tasks"),
    (lambda t, r, n: random.sample(list(t), len(t) // n), "in all, and stands once in the list"),
    (lambda t, r, n: [t[i] for i in torch.arange(r, len(t), n)], "my_share(3 tasks, rank=4, world"),
    (lambda t, r, n: [t[r + k * n] for k in range(len(t) // n + 1)], "a position beyond the end"),
    (lambda t, r, n: t[r], "one task, or none, is a list"),
    (lambda t, r, n: [task for i, task in enumerate(t) if i // n == r], "position % world_size"),
    (lambda t, r, n: sorted(t)[r::n], "the tasks were sorted"),
]


# ---- 0.4 fit_power_law ----------------------------------------------------------------------


@right("0.4")
def fit_with_numpy(sizes, errors):
    slope, intercept = np.polyfit(np.log10(sizes), np.log10(errors), 1)
    return np.array([10**intercept, -slope])


@right("0.4")
def fit_in_32_bits(sizes, errors):
    x, y = torch.tensor(sizes).log2(), torch.tensor(errors).log2()
    matrix = torch.stack([torch.ones(len(x)), x], dim=1)
    intercept, slope = torch.linalg.lstsq(matrix, y[:, None]).solution[:, 0]
    return 2**intercept, -slope


@right("0.4")
def fit_by_sums(sizes, errors):
    x, y, n = [math.log(s) for s in sizes], [math.log(e) for e in errors], len(sizes)
    products = sum(p * q for p, q in zip(x, y, strict=True))
    slope = (n * products - sum(x) * sum(y)) / (n * sum(p * p for p in x) - sum(x) ** 2)
    return [math.exp((sum(y) - slope * sum(x)) / n), -slope]


def line(x, y):
    slope, intercept = np.polyfit(x, y, 1)
    return slope, intercept


def fit_curve(sizes, errors):
    """What a program for curves, such as scipy's curve_fit, gives: least squares of the error."""
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (sizes, errors))
    start = fit_with_numpy(sizes, errors)
    found = torch.tensor([math.log(start[0]), start[1]], dtype=torch.float64, requires_grad=True)
    scale = y.square().sum()
    optimizer = torch.optim.LBFGS([found], max_iter=500, line_search_fn="strong_wolfe")
    optimizer.param_groups[0].update(tolerance_grad=1e-14, tolerance_change=1e-16)

    def loss():
        optimizer.zero_grad()
        value = (found[0].exp() * x ** -found[1] - y).square().sum() / scale
        value.backward()
        return value

    optimizer.step(loss)
    return found[0].exp().item(), found[1].item()


def fit_with_a_dict(sizes, errors):
    table = dict(zip(sizes, errors, strict=True))
    return fit_with_numpy(list(table), list(table.values()))


def fit_of_means(sizes, errors):
    table = {}
    for size, error in zip(sizes, errors, strict=True):
        table.setdefault(size, []).append(error)
    return fit_with_numpy(list(table), [fmean(found) for found in table.values()])


def logs(log, *lists):
    return [[log(value) for value in values] for values in lists]


def fit_with(finish, log=math.log):
    """A fit on logarithmic axes whose slope and intercept are finished in some way."""
    return lambda sizes, errors: finish(*line(*logs(log, sizes, errors)))


def through_the_origin(sizes, errors):
    x, y = logs(math.log, sizes, errors)
    return 1.0, -sum(p * q for p, q in zip(x, y, strict=True)) / sum(p * p for p in x)


def moments(sizes, errors, slope_of):
    """A line through the middle of the points, with some slope."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(errors).double().log()
    slope = slope_of(x, y)
    return math.exp(y.mean() - slope * x.mean()), -slope.item()


def fit_by_a_search(sizes, errors):
    a, b = fit_with_numpy(sizes, errors)
    return 1.02 * a, 1.004 * b  # where steps of gradient descent leave it


def fit_of_the_first_two(sizes, errors):
    b = -math.log(errors[1] / errors[0]) / math.log(sizes[1] / sizes[0])
    return errors[0] * sizes[0] ** b, b


WRONG["0.4"] += [
    (fit_by_a_search, "has not arrived"),
    (fit_of_the_first_two, " - "),
    (fit_with(lambda s, i: (math.exp(s), -i)), "np.polyfit gives the slope first"),
    (lambda s, e: (math.exp(line(s, e)[1]), -line(s, e)[0]), "no logarithm was taken"),
    (fit_with(lambda s, i: (round(math.exp(i), 2), round(-s, 2))), "a and b were rounded"),
    (lambda s, e: moments(s, e, lambda x, y: -y.std() / x.std()), "how far y goes with x"),
    (
        lambda s, e: moments(s, e, lambda x, y: ((x - x.mean()) * y).mean() / x.var()),
        "of the other n - 1",
    ),
    (lambda s, e: torch.log(s), "torch.log takes a tensor"),
    (fit_with(lambda s, i: (math.exp(i), s)), "a curve that falls has a positive b"),
    (fit_with(lambda s, i: (i, -s)), "that is the logarithm of a"),
    (fit_with(lambda s, i: (math.exp(i), -s), math.log2), "undone with another"),
    (fit_with(lambda s, i: (-s, math.exp(i))), "a and b have changed places"),
    (lambda s, e: fit_with_numpy(e, s), "x and y have changed places"),
    (
        lambda s, e: (math.exp(line(s, np.log(e))[1]), -line(s, np.log(e))[0]),
        "take the logarithm of the sizes as well",
    ),
    (
        lambda s, e: (line(np.log(s), e)[1], -line(np.log(s), e)[0]),
        "take the logarithm of the errors as well",
    ),
    (through_the_origin, "fit an intercept, too"),
    (fit_curve, "where a factor 2 is as far"),
    (fit_with_a_dict, "a dict keeps the last one of a size"),
    (fit_of_means, "without averaging first"),
    (lambda s, e: np.polyfit(np.log(s), np.log(e), 1), "those are slope and intercept"),
]


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
    (job_after(lambda text: text.replace("\n", "")), "nothing breaks the lines"),
    (command_with(lambda command: f"exec {command}"), "what to run is for the caller to say"),
    (job_with("#SBATCH --nodes", "# SBATCH --nodes"), "'# SBATCH' is a comment to Slurm"),
    (job_indented, "begins with a space, so Slurm takes it for a comment"),
    (job_with_the_command_first, "the first command, which is 'set -euo pipefail'"),
    (job_after(lambda text: "\n" + text), "also the line break and the spaces before #!"),
    (job_after(lambda text: text.replace("\n", "\r\n")), "lines end with \\r\\n"),
    (job_without_f, "put an f before the quotes"),
    (job_with("ntasks-per-node=1", "ntasks-per-node={gpus}"), "16 processes a node"),
    (job_with("--ntasks-per-node=1", "--ntasks=1"), "a node without a task is not given"),
    (job_with("--ntasks-per-node=1", "--ntasks={all}"), "Slurm would start 4 tasks"),
    (job_with("--gpus-per-node={gpus}", "--gpus={all}"), "counts over the whole job"),
    (job_with("--gpus-per-node={gpus}", "--gpus-per-node={all}"), "what all 2 nodes have together"),
    (job_with("--gpus-per-node", "--gpu-per-node"), "it has no option --gpu-per-node"),
    (job_with("#SBATCH --nodes={nodes}\n", ""), "--nodes is missing"),
    (job_with("--nodes={nodes}", "--nodes=$NODES"), "which knows no variables of the shell"),
    (job_with("--nodes={nodes}", "--nodes = {nodes}"), "without spaces around ="),
    (job_with(TIME, "--time={hours:02}:{rest:02}"), "two numbers are minutes and seconds"),
    (job_with(TIME, "--time={seconds}"), "that is seconds, but one number is minutes"),
    (job_with("%x-%j.out", "logs/%x-%j.out"), "Slurm makes no folders"),
    (job_with("%x-%j.out", "%%x-%%j.out"), "needs no doubling"),
    (command_with(lambda command: ""), "no line holds the command"),
    (command_with(lambda command: f"srun {command}"), "it brings its own srun"),
    (command_with(lambda command: f"{command}\necho done"), "it counts as completed"),
    (job_after(print), "not returned"),
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
    (site_with("COUNT=class", "COUNT = class"), "bash wants no space around ="),
    (site_with("COUNT=class", "COUNT= class"), "bash wants no space around it"),
    (site_with("export SBATCH_ACCOUNT", "SBATCH_ACCOUNT"), "only exported variables are handed on"),
    (site_with("=class", "=home"), "may use the partition cpu only"),
    (site_with("=class", "=$USER"), "that is your own name"),
    (site_with("=class", "=\u201cclass\u201d"), "such as a curly quote"),
    (site_with("SBATCH_ACCOUNT", "SBATCH_ACOUNT"), "there is SBATCH_ACOUNT"),
    (site_with(PARTITION, "SBATCH_PARTITION=cpu"), "its GRES are (null)"),
    (site_with(PARTITION, "SBATCH_PARTITION=gpu-test"), "ends every job after 30 minutes"),
    (site_with("ib0", "eth0"), "training would wait for gradients"),
    (site_with("ib0", "10.2.0.14"), "an address is another one on every node"),
    (site_with("=-ib", "=ib"), "which is no node's name"),
    (site_with(LOAD, "module load python/3.12 cuda/12.8"), "python/3.12 is not in the list"),
    (site_with(LOAD, LOAD + " PyTorch"), "there is no PyTorch"),
    (site_with("export ", "setenv "), "setenv belongs to another shell"),
    (site_with("\n", "\r\n"), "lines end with \\r\\n"),
    (site_with("export ", "exit 1; export "), "the file ends the shell"),
    (site_with(LOAD, LOAD + "\nexport SBATCH_TIMELIMIT=1-0"), "overrules that line"),
    (lambda: {"SBATCH_ACCOUNT": "class"}, "return six lines in quotes"),
    (lambda: print(planning.site_file()), "printed or written, not returned"),
]


# ---- 0.7 device_hours -----------------------------------------------------------------------


@right("0.7")
def hours_with_numpy(busy, num_granted, seconds):
    used = np.sum([np.mean(samples) if len(samples) else 0 for samples in busy])
    return seconds * num_granted / 3600, used * seconds / 3600


@right("0.7")
def hours_of_each_device(busy, num_granted, seconds):
    used = 0.0
    for samples in busy:
        for sample in samples:
            used += sample * seconds / len(samples)
    return [num_granted * (seconds / 3600), used / 3600]


@right("0.7")
def hours_with_idle_devices_as_zeros(busy, num_granted, seconds):
    means = [fmean(samples or [0]) for samples in busy]
    means += [0.0] * (num_granted - len(means))
    return num_granted * seconds / 3600, fmean(means) * num_granted * seconds / 3600


def means_of(busy):
    return [fmean(samples) if samples else 0.0 for samples in busy]


def flat(busy):
    return [sample for samples in busy for sample in samples] or [0]


def used_as(used):
    """Charged right; used in some way of busy, the number granted, and the hours."""
    return lambda busy, granted, s: (granted * s / 3600, used(busy, granted, s / 3600))


def charged_as(charged):
    """Used right; charged in some way of the ranks' number, the number granted, and seconds."""
    return lambda busy, granted, s: (charged(len(busy), granted, s), sum(means_of(busy)) * s / 3600)


def nan_mean(busy):
    return sum(torch.tensor(samples).mean().item() for samples in busy)


def without_idle_ranks(busy, num_granted, seconds):
    for samples in busy:
        if not samples:
            busy.remove(samples)
    return num_granted * seconds / 3600, sum(map(fmean, busy)) * seconds / 3600


def rounded_hours(busy, num_granted, seconds):
    return [round(hours, 2) for hours in planning.device_hours(busy, num_granted, seconds)]


WRONG["0.7"] += [
    (without_idle_ranks, "the caller's list was changed"),
    (rounded_hours, "it was rounded"),
    (charged_as(lambda n, g, s: g * (s // 3600)), "// keeps whole hours only"),
    (lambda b, g, s: (dist.get_world_size() * s / 3600, 0), "use the arguments"),
    (used_as(lambda b, g, h: torch.tensor(b).mean().item() * h * len(b)), "make no table"),
    (used_as(lambda b, g, h: torch.stack([torch.tensor(s) for s in b]).mean(1)), "make no table"),
    (used_as(lambda b, g, h: sum(map(max, filter(len, b))) * h), "a rank's largest sample"),
    (used_as(lambda b, g, h: sum(fmean(s) if s else 1 for s in b) * h), "its mean is 0, not 1"),
    (charged_as(lambda n, g, s: n * s / 3600), "charged is what was granted, with a rank or not"),
    (used_as(lambda b, g, h: (fmean(means_of(b)) if b else 0) * g * h), "worked for 0 hours"),
    (used_as(lambda b, g, h: fmean(flat(b)) * len(b) * h), "a rank with more samples counts more"),
    (used_as(lambda b, g, h: (fmean(means_of(b)) if b else 0) * h), "one device's hours"),
    (used_as(lambda b, g, h: sum(means_of(b)) * h * 3600), "those are device-seconds"),
    (used_as(lambda b, g, h: nan_mean(b) * h), "the mean of nothing"),
    (used_as(lambda b, g, h: sum(sum(s) / len(s) for s in b) * h), "has no mean"),
    (
        used_as(lambda b, g, h: len(b) * h * fmean([fmean(s) for s in b if s] or [0])),
        "a rank without samples counts as idle",
    ),
    (lambda b, g, s: (sum(means_of(b)) * s / 3600, g * s / 3600), "they have changed places"),
    (lambda b, g, s: sum(means_of(b)) * s / 3600, "two numbers are asked for"),
]
