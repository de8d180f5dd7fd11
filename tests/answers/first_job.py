"""Answers to lesson 00 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import math
import os
import socket
import textwrap
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from manyhands import first_job, power_law
from manyhands.first_job import Place

RIGHT: dict[str, list] = {
    "0.1": [first_job.days_on_devices],
    "0.2": [first_job.device_map],
    "0.3": [first_job.my_share],
    "0.4": [power_law.fit_power_law],
    "0.5": [first_job.job_file],
    "0.6": [first_job.site_file],
    "0.7": [first_job.device_hours],
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
    (lambda w, n, p, u: w / (n * p / 1e6 * u), "a factor of 1,000: peak_tflops counts 1e12"),
    (lambda w, n, p, u: w * 1e15 / (n * p * 1e12 * u) / 86400, "already the work of a whole day"),
    (lambda w, n, p, u: 24 * w / (n * p / 1000 * u), "a factor of 24: a PF/s-day is already"),
    (lambda w, n, p, u: w * 1e15 * 86400 / (n * p * 1e12 * u), "a factor of 86,400"),
    (lambda w, n, p, u: w / 24 / (n * p * u), "a PF/s 1e15; and a factor of 24"),
    (lambda w, n, p, u: w / (n * p / 1000), "`utilisation` is left out"),
    (lambda w, n, p, u: w / (n * p / 1000) * u, "multiply the speed by it, not the days"),
    (lambda w, n, p, u: w / (n * p / 1000 * u / 100), "not a percentage"),
    (lambda w, n, p, u: w / (n * p / 1000 * (1 - u)), "1 - utilisation is what is lost"),
    (lambda w, n, p, u: w / (p / 1000 * u), "the devices are left out"),
    (lambda w, n, p, u: w * n / (p / 1000 * u), "divide by num_devices"),
    (lambda w, n, p, u: n * p / 1000 * u / w, "that is days turned over"),
    (lambda w, n, p, u: w // (n * p / 1000 * u), "the days were rounded"),
    (lambda w, n, p, u: math.ceil(w / (n * p / 1000 * u)), "the days were rounded"),
    (lambda w, n, p, u: round(w / (n * p / 1000 * u), 2), "the days were rounded"),
    (lambda w, n, p, u: f"{w / (n * p / 1000 * u):.1f} days", "that is no number"),
    (lambda w, n, p, u: 0.0, "is 0, not "),
    (lambda w, n, p, u: print(w / (n * p / 1000 * u)), "nothing is returned"),
    (lambda w, n, p: w / (n * p / 1000), "TypeError"),
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


@wrong("0.2", "not WORLD_SIZE")
@map_with
def gpus_for_the_whole_job(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    enough = num_gpus >= int(environ["WORLD_SIZE"])
    return mine._replace(device=mine.device if enough else "cpu")


@wrong("0.2", "4 processes cannot have one each")
@map_with
def a_gpu_is_enough(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=f"cuda:{mine.local_rank}" if num_gpus else "cpu")


@wrong("0.2", "4 processes cannot have one each")
@map_with
def some_on_gpus(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=f"cuda:{mine.local_rank}" if mine.local_rank < num_gpus else "cpu")


@wrong("0.2", "all processes of the node would share one GPU")
@map_with
def all_on_gpu_0(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=mine.device.replace(f":{mine.local_rank}", ""))


@wrong("0.2", "do not matter")
@map_with
def device_as_torch_sees_it(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    lucky = num_gpus == int(environ["LOCAL_WORLD_SIZE"]) or torch.cuda.is_available()
    return mine._replace(device=mine.device if lucky else "cpu")


@wrong("0.2", "torch's name of a GPU is cuda")
@map_with
def device_named_gpu(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(device=mine.device.replace("cuda", "gpu"))


@wrong("0.2", "RANK counts over the whole job")
@map_with
def ranks_swapped(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return mine._replace(rank=mine.local_rank)


@wrong("0.2", "in the order rank, host, local_rank, device")
@map_with
def parts_in_another_order(environ, num_gpus, host):
    mine = place_of(environ, num_gpus, host)
    return Place(mine.rank, mine.local_rank, mine.host, mine.device)


@wrong("0.2", "whose parts have names")
@map_with
def tuples(environ, num_gpus, host):
    return tuple(place_of(environ, num_gpus, host))


@wrong("0.2", "a rank knows its own environment only")
def map_of_oneself(environ, num_gpus, host, group=None):
    return [place_of(environ, num_gpus, host)]


@wrong("0.2", "return the list of Places")
def map_of_one_place(environ, num_gpus, host, group=None):
    return place_of(environ, num_gpus, host)


@wrong("0.2", "itself returns None")
def map_that_is_what_gather_returns(environ, num_gpus, host, group=None):
    places = [None] * dist.get_world_size(group)
    return dist.all_gather_object(places, place_of(environ, num_gpus, host), group=group)


@wrong("0.2", "ranks 1, 2 and 3 return None")
def map_on_rank_0(environ, num_gpus, host, group=None):
    places = gathered(place_of(environ, num_gpus, host), group)
    if dist.get_rank(group) == 0:
        return places


@wrong("0.2", "the list was never filled")
def map_never_filled(environ, num_gpus, host, group=None):
    places = [None] * dist.get_world_size(group)
    places[dist.get_rank(group)] = place_of(environ, num_gpus, host)
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


@wrong("0.2", "the list is shorter than the group")
def map_of_one_node(environ, num_gpus, host, group=None):
    places = [None] * int(environ["LOCAL_WORLD_SIZE"])
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


@wrong("0.2", "not every rank makes the same calls")
def map_that_rank_0_alone_gathers(environ, num_gpus, host, group=None):
    if environ["RANK"] == "0":
        return gathered(place_of(environ, num_gpus, host), group)
    return []


@wrong("0.2", "what this rank sends")
def map_that_sends_nothing(environ, num_gpus, host, group=None):
    return dist.all_gather_object(place_of(environ, num_gpus, host), group=group)


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


def shuffled_share(tasks, rank, world_size):
    order = torch.randperm(len(tasks), generator=torch.Generator().manual_seed(rank)).tolist()
    return [tasks[index] for index in order][rank::world_size]


WRONG["0.3"] += [
    (pieces, "solid pieces"),
    (
        lambda t, r, n: list(t[r * len(t) // n : (r + 1) * len(t) // n]),
        "the last rank gets all the long ones",
    ),
    (lambda t, r, n: [list(part) for part in np.array_split(t, n)][r], "or an array?"),
    (lambda t, r, n: list(t[r : r + len(t) // n]), "cut pieces that overlap"),
    (lambda t, r, n: t[r::n], "a list is asked for"),
    (lambda t, r, n: (task for task in t[r::n]), "generator"),
    (lambda t, r, n: list(t), "every rank does everything"),
    (lambda t, r, n: list(range(r, len(t), n)), "those are positions in the list"),
    (lambda t, r, n: list(t[n::r]), "rank and world_size have changed places"),
    (
        lambda t, r, n: [task for i, task in enumerate(t) if i % r == n],
        "rank and world_size have changed places",
    ),
    (lambda t, r, n: list(t[r + 1 :: n]), "the first task is done by nobody"),
    (lambda t, r, n: list(t[n - 1 - r :: n]), "rank 0 begins at position 0"),
    (lambda t, r, n: list(t[r::n])[::-1], "the order within the share"),
    (lambda t, r, n: list(t[: len(t) // n * n][r::n]), "the rest of the division was dropped"),
    (padded, "do not pad"),
    (lambda t, r, n: [task for task in t if list(t).index(task) % n == r], "go by the position"),
    (lambda t, r, n: list(t[r : r + 1]), "the positions are rank, rank + world_size"),
    (shuffled_share, "times in all"),
    (popped, "the caller's list was changed"),
    (lambda t, r, n: print(t[r::n]), "nothing is returned"),
    (lambda t, r, n: t.sort(), "has no attribute 'sort'"),
    (lambda t, r, n: list(t[dist.get_rank() :: n]), "no message is needed"),
    (lambda t, r, n: [t[r::n]], "is there a list in the list"),
    (lambda t, r, n: [*dict.fromkeys(t)][r::n], "knows only one of them"),
]


# ---- 0.4 fit_power_law ----------------------------------------------------------------------


@right("0.4")
def fit_with_numpy(sizes, errors):
    slope, intercept = np.polyfit(np.log10(sizes), np.log10(errors), 1)
    return 10**intercept, -slope


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


def fit_of_two_points(sizes, errors):
    low, high = sizes.index(min(sizes)), sizes.index(max(sizes))
    b = -math.log(errors[high] / errors[low]) / math.log(sizes[high] / sizes[low])
    return errors[low] * sizes[low] ** b, b


def fit_by_neighbours(sizes, errors):
    pairs = list(zip(sizes, errors, strict=True))
    slopes = [
        math.log(f / e) / math.log(t / s)
        for (s, e), (t, f) in zip(pairs, pairs[1:], strict=False)
        if s != t
    ]
    b = -fmean(slopes)
    return math.exp(fmean(math.log(e) + b * math.log(s) for s, e in pairs)), b


def logs(log, *lists):
    return [[log(value) for value in values] for values in lists]


def fit_with(finish, log=math.log):
    """A fit on logarithmic axes whose slope and intercept are finished in some way."""
    return lambda sizes, errors: finish(*line(*logs(log, sizes, errors)))


def through_the_origin(sizes, errors):
    x, y = logs(math.log, sizes, errors)
    return 1.0, -sum(p * q for p, q in zip(x, y, strict=True)) / sum(p * p for p in x)


WRONG["0.4"] += [
    (fit_with(lambda s, i: (math.exp(i), s)), "a curve that falls has a positive b"),
    (fit_with(lambda s, i: (i, -s)), "that is the logarithm of a"),
    (fit_with(lambda s, i: (i, s)), "that is the logarithm of a"),
    (fit_with(lambda s, i: (i, -s), math.log10), "that is the logarithm of a"),
    (fit_with(lambda s, i: (math.exp(i), -s), math.log10), "undone with another"),
    (fit_with(lambda s, i: (10**i, -s)), "undone with another"),
    (fit_with(lambda s, i: (math.exp(i), -s), math.log2), "undone with another"),
    (fit_with(lambda s, i: (2**i, -s)), "undone with another"),
    (fit_with(lambda s, i: (math.exp(i), abs(s))), "b may be negative"),
    (fit_with(lambda s, i: (-s, math.exp(i))), "a and b have changed places"),
    (fit_with(lambda s, i: (math.exp(-i), -s)), "the intercept has the wrong sign"),
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
    (fit_of_two_points, "lets chance decide"),
    (fit_by_neighbours, "the least possible is"),
    (lambda s, e: fit_with_numpy(s, e)[1], "two numbers are asked for"),
    (lambda s, e: print(fit_with_numpy(s, e)), "nothing is returned"),
    (lambda s, e: (math.exp(math.log(s)), 0.5), "math.log takes one number"),
    (lambda s, e: np.polyfit(np.log(s), np.log(e), 1), "two numbers are asked for"),
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
        text = first_job.job_file(name, nodes, gpus_per_node, minutes, command)
        before = old.format(**call, time=f"{minutes // 60:02}:{minutes % 60:02}:00")
        assert before in text, before
        hours, rest = divmod(minutes, 60)
        more = {"hours": hours, "rest": rest, "all": nodes * gpus_per_node, "part": minutes / 60}
        return text.replace(before, new.format(**call, **more, seconds=60 * minutes))

    return answer


def command_with(form):
    def answer(name, nodes, gpus_per_node, minutes, command):
        text = first_job.job_file(name, nodes, gpus_per_node, minutes, "COMMAND")
        return text.replace("COMMAND", form(command))

    return answer


def job_after(change):
    return lambda *call: change(first_job.job_file(*call))


def job_with_the_command_first(name, nodes, gpus_per_node, minutes, command):
    first, *rest = first_job.job_file(name, nodes, gpus_per_node, minutes, command).split("\n")
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


def job_written_to_a_file(*call):
    Path("/dev/null").write_text(first_job.job_file(*call))


TIME = "--time={time}"
WRONG["0.5"] += [
    (job_with("#SBATCH --nodes", "# SBATCH --nodes"), "'# SBATCH' is a comment to Slurm"),
    (job_after(lambda text: text.replace("#SBATCH", "#sbatch")), "no space, capital letters"),
    (job_indented, "begins with a space, so Slurm takes it for a comment"),
    (job_with_the_command_first, "the first command, which is 'set -euo pipefail'"),
    (job_after(lambda text: "\n" + text), "also the line break and the spaces before #!"),
    (job_after(lambda text: textwrap.indent(text, "    ")), "does not look like a batch script"),
    (job_after(lambda text: text.split("\n", 1)[1]), "which program reads the rest"),
    (job_with("#!/bin/bash", "#!/usr/bin/python3"), "bash is asked for"),
    (job_after(lambda text: text.replace("\n", "\r\n")), "lines end with \\r\\n"),
    (job_without_f, "put an f before the quotes"),
    (job_with("ntasks-per-node=1", "ntasks-per-node={gpus}"), "16 processes a node"),
    (job_with("--ntasks-per-node=1", "--ntasks=1"), "a node without a task is not given"),
    (job_with("--ntasks-per-node=1", "--ntasks-per-node=0"), "no task a node is asked for"),
    (job_with("--job-name={name}", "--job-name={name} \\\n --nodes=2"), "the first command, which"),
    (job_with("--ntasks-per-node=1", "--ntasks={all}"), "Slurm would start 4 tasks"),
    (job_with("--gpus-per-node={gpus}", "--gpus={all}"), "counts over the whole job"),
    (job_with("--gpus-per-node={gpus}", "--gpus-per-node={all}"), "what all 2 nodes have together"),
    (job_with("--gpus-per-node={gpus}", "--gres=gpu"), "--gres=gpu asks for 1 on each node"),
    (job_with("#SBATCH --gpus-per-node={gpus}\n", ""), "a job that asks for no GPU gets none"),
    (job_with("--gpus-per-node", "--gpu-per-node"), "it has no option --gpu-per-node"),
    (job_with("--gpus-per-node", "--gpus_per_node"), "--gpus-per-node"),
    (job_with("#SBATCH --nodes={nodes}\n", ""), "--nodes is missing"),
    (job_with("--nodes={nodes}", "--nodes=1-{nodes}"), "Slurm may give any number"),
    (job_with("--nodes={nodes}", "--nodes=$NODES"), "which knows no variables of the shell"),
    (job_with("--nodes={nodes}", "--nodes = {nodes}"), "without spaces around ="),
    (job_with("--nodes={nodes}", "--nodes={nodes}.0"), "that is no number"),
    (job_with("--nodes={nodes}", "nodes={nodes}"), "is no option"),
    (job_with(TIME, "--time={hours:02}:{rest:02}"), "two numbers are minutes and seconds"),
    (job_with(TIME, "--time={minutes}:00:00"), "as many hours"),
    (job_with(TIME, "--time={seconds}"), "that is seconds, but one number is minutes"),
    (job_with(TIME, "--time={hours}:00:00"), "the minutes beyond whole hours are lost"),
    (job_with(TIME, "--time=00:{rest:02}:00"), "the whole hours are lost"),
    (job_with(TIME, "--time={part}:00:00"), "no letters and no decimals"),
    (job_with(TIME, "--time={minutes}m"), "no letters and no decimals"),
    (job_with(TIME, "--time=0"), "0 is no limit at all"),
    (job_with("#SBATCH --time={time}\n", ""), "--time is missing"),
    (job_with("--job-name={name}", "--job_name={name}"), "it has no option --job_name"),
    (job_with("#SBATCH --job-name={name}\n", ""), "has the name of the file"),
    (job_with("#SBATCH --output=%x-%j.out\n", ""), "slurm-<number>.out"),
    (job_with("%x-%j.out", "{name}.out"), "write to first_job.out, not first_job-4711.out"),
    (job_with("%x-%j.out", "%x-$SLURM_JOB_ID.out"), "%j is the number"),
    (job_with("%x-%j.out", "logs/%x-%j.out"), "Slurm makes no folders"),
    (job_with("%x-%j.out", "%%x-%%j.out"), "needs no doubling"),
    (job_with("%x-%j.out", "%j-%x.out"), "not first_job-4711.out"),
    (job_with("%x-%j.out", "%x-%j.out\n#SBATCH --error=%x-%j.err"), "errors would go to another"),
    (job_with("%x-%j.out", '"%x-%j.out'), "a quote is not closed"),
    (command_with(lambda command: ""), "no line holds the command"),
    (command_with(lambda command: f"srun {command}"), "it brings its own srun"),
    (command_with(lambda command: f"{command} &"), "lets the script go on at once"),
    (command_with(lambda command: f"{command}\n{command}"), "2 times"),
    (command_with(lambda command: f"{command}\necho done"), "it counts as completed"),
    (command_with(lambda command: f"'{command}'"), "the last line is the command"),
    (job_after(print), "not returned"),
    (job_written_to_a_file, "not returned"),
    (job_after(str.encode), "return the text of the file"),
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
        assert old in first_job.site_file(), old
        return first_job.site_file().replace(old, new)

    return answer


PARTITION, GPUS = "SBATCH_PARTITION=gpu", "GPUS_PER_NODE=4"
LOAD = "module load Python/3.12 CUDA/12.8"
WRONG["0.6"] += [
    (site_with("COUNT=class", "COUNT = class"), "bash wants no space around ="),
    (site_with("export SBATCH_ACCOUNT=class", "SBATCH_ACCOUNT = class"), "no space around ="),
    (site_with("COUNT=class", "COUNT= class"), "bash wants no space around it"),
    (site_with("export SBATCH_ACCOUNT", "SBATCH_ACCOUNT"), "only exported variables are handed on"),
    (site_with("export ", ""), "only exported variables are handed on"),
    (site_with("=class", "=home"), "may use the partition cpu only"),
    (site_with("=class", "=$USER"), "that is your own name"),
    (site_with("=class", "=gpu"), "that is a partition"),
    (site_with("=class", "="), "nothing stands right behind ="),
    (site_with("=class", "=class#of ours"), "a comment needs a space before #"),
    (site_with("=class", "='class '"), "spaces, quotes and capital letters count"),
    (site_with("=class", "=\u201cclass\u201d"), "such as a curly quote"),
    (site_with("=class", "=Class"), "spaces, quotes and capital letters count"),
    (site_with("=class", "='class"), "a quote or a bracket that is not closed"),
    (site_with("SBATCH_ACCOUNT", "SBATCH_ACOUNT"), "there is SBATCH_ACOUNT"),
    (site_with("SBATCH_ACCOUNT", "ACCOUNT"), "SBATCH_ACCOUNT is not set"),
    (site_with(PARTITION, "SBATCH_PARTITION='gpu*'"), "no partition has a * in its name"),
    (site_with(PARTITION, "SBATCH_PARTITION='cpu*'"), "it has no GPU"),
    (site_with(PARTITION, "SBATCH_PARTITION=cpu"), "its GRES are (null)"),
    (site_with(PARTITION, "SBATCH_PARTITION=gpu-test"), "ends every job after 30 minutes"),
    (site_with(PARTITION, "SBATCH_PARTITION=gpu,gpu-test"), "one queue"),
    (site_with(GPUS, "GPUS_PER_NODE=48"), "the GPUs of all 12 nodes"),
    (site_with(GPUS, "GPUS_PER_NODE=12"), "the number of nodes"),
    (site_with(GPUS, "GPUS_PER_NODE=2"), "what a node of gpu-test has"),
    (site_with(GPUS, "GPUS_PER_NODE=gpu:h100:4"), "that is the form of --gres"),
    (site_with("ib0", "eth0"), "training would wait for gradients"),
    (site_with("ib0", "lo"), "leads to no other node"),
    (site_with("ib0", "10.2.0.14"), "an address is another one on every node"),
    (site_with("ib0", "IB0"), "capital letters count"),
    (site_with("ib0", "^lo,docker0"), "NCCL_SOCKET_IFNAME is '^lo,docker0'"),
    (site_with("ib0", "ib0,eth0"), "one network is asked for"),
    (site_with("=-ib", "=ib"), "which is no node's name"),
    (site_with("=-ib", "=g14-ib"), "only the ending"),
    (site_with("=-ib", "=i"), "the node is called g14-ib there"),
    (site_with("=-ib", "=ib0"), "not a name of the node"),
    (site_with("=-ib", "=.cluster"), "HEAD_SUFFIX is '.cluster'"),
    (site_with(LOAD, ""), "loaded: nothing; Python/3.12 is missing"),
    (site_with(LOAD, "module load Python/3.12"), "CUDA/12.8 is missing"),
    (site_with(LOAD, "module load python/3.12 cuda/12.8"), "python/3.12 is not in the list"),
    (site_with(LOAD, "module load Python/3.11 CUDA/12.8"), "Python/3.11 is not in the list"),
    (site_with(LOAD, "module Python/3.12 CUDA/12.8"), "module needs a verb"),
    (site_with(LOAD, "load Python/3.12 CUDA/12.8"), "bash takes the first word for a program"),
    (site_with(LOAD, LOAD + " PyTorch"), "there is no PyTorch"),
    (site_with("export ", "setenv "), "setenv belongs to another shell"),
    (site_with("export SBATCH_ACCOUNT=", "SBATCH_ACCOUNT: "), "the form of a YAML file"),
    (site_with("export ", "$ export "), "is the prompt"),
    (site_with("\n", "\r\n"), "lines end with \\r\\n"),
    (site_with("export ", "exit 1; export "), "the file ends the shell"),
    (site_with(LOAD, LOAD + "\nsleep 60"), "never ends"),
    (site_with(LOAD, LOAD + "\nexport SBATCH_TIMELIMIT=1-0"), "overrules that line"),
    (lambda: {"SBATCH_ACCOUNT": "class"}, "return six lines in quotes"),
    (lambda: print(first_job.site_file()), "return six lines in quotes"),
    (lambda: first_job.site_file().split("\n"), "return six lines in quotes"),
    (lambda: "sbatch/site.env", "first word for a program"),
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


WRONG["0.7"] += [
    (charged_as(lambda n, g, s: n * s / 3600), "charged is what was granted, with a rank or not"),
    (charged_as(lambda n, g, s: s / 3600), "each granted device is charged"),
    (charged_as(lambda n, g, s: g * s), "those are device-seconds"),
    (charged_as(lambda n, g, s: g * s / 60), "those are device-minutes"),
    (used_as(lambda b, g, h: (fmean(means_of(b)) if b else 0) * g * h), "worked for 0 hours"),
    (used_as(lambda b, g, h: fmean(flat(b)) * g * h), "the mean of the ranks there are"),
    (used_as(lambda b, g, h: fmean(flat(b)) * len(b) * h), "a rank with more samples counts more"),
    (used_as(lambda b, g, h: (fmean(means_of(b)) if b else 0) * h), "one device's hours"),
    (used_as(lambda b, g, h: g * h - sum(means_of(b)) * h), "that is what was idle"),
    (used_as(lambda b, g, h: sum(means_of(b)) / g), "not "),
    (used_as(lambda b, g, h: sum(means_of(b))), "those are devices, not hours"),
    (used_as(lambda b, g, h: fmean(means_of(b) or [0])), "that is a share, not hours"),
    (used_as(lambda b, g, h: sum(means_of(b)) * h * 3600), "those are device-seconds"),
    (used_as(lambda b, g, h: sum(flat(b)) * h), "samples were added up, not averaged"),
    (used_as(lambda b, g, h: sum(flat(b)) * 0.5 / 3600), "how far apart samples are is not said"),
    (used_as(lambda b, g, h: len(b) * h), "a rank is not busy all the time"),
    (used_as(lambda b, g, h: sum(means_of(b)) * h * 100), "percent were made of a share"),
    (used_as(lambda b, g, h: nan_mean(b) * h), "the mean of nothing"),
    (used_as(lambda b, g, h: sum(sum(s) / len(s) for s in b) * h), "has no mean"),
    (used_as(lambda b, g, h: sum(fmean(s) for s in b) * h), "has no mean"),
    (
        used_as(lambda b, g, h: len(b) * h * fmean([fmean(s) for s in b if s] or [0])),
        "a rank without samples counts as idle",
    ),
    (lambda b, g, s: (sum(means_of(b)) * s / 3600, g * s / 3600), "they have changed places"),
    (lambda b, g, s: sum(means_of(b)) * s / 3600, "two numbers are asked for"),
    (lambda b, g, s: print(g * s / 3600), "nothing is returned"),
    (lambda b, g, s: Counter(charged=g, used=1), "two numbers are asked for"),
]
