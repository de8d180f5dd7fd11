"""0.4: a mended job file, judged by what Slurm would grant and by what it would start.

Many texts are right, so a text is judged by rules: its #SBATCH lines are read as sbatch reads them,
its script is rehearsed on made-up nodes, and Slurm itself is asked where there is one.
"""

import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed
from manyhands.checks.first_job.directives import file_name, minutes_of, read_directives
from manyhands.first_job import job_text
from manyhands.first_job.rehearsal import Rehearsal, Start, rehearse

NODES, GPUS, MINUTES = 2, 4, 90  # what the task asks for
MEMORY_MB = 64_000, 65_536  # 64 GB, however they are counted
DEFAULT_PORT = "29400"  # torchrun's own, where an endpoint names none

Fault = tuple[str, str, str]  # what is seen, why it is wrong, what to try


class Granted(NamedTuple):
    """The nodes that Slurm gives, and the numbers of two such jobs."""

    nodes: tuple[str, ...]
    job: int
    other_job: int


def grants() -> list[Granted]:
    """Nodes that nobody could have guessed; two jobs that follow one another."""
    rack = random.choice("kmnqt")
    first, second = sorted(random.sample(range(10, 99), 2))
    job = random.randrange(100_000, 900_000)
    nodes = (f"{rack}{first}", f"{rack}{second}")
    return [Granted(nodes, job, job + random.choice((1, 2, 3, 7, 13)))]


def job_seen(answer: object, case: Granted) -> str:
    """ "accepted", or Wrong with the first of the faults that are left."""
    text = answer()
    if not isinstance(text, str):
        raise malformed(text, "the text of the file", "Return the text; do not print or write it.")
    _compare_start(text)
    faults = list(faults_of(text, case))
    if faults:
        seen, why, hint = faults[0]
        left = f" ({len(faults)} faults are left, this is the first)" if len(faults) > 1 else ""
        raise Wrong(f"{seen}{left}", why, hint)
    _ask_slurm(text)
    return "accepted"


def faults_of(text: str, case: Granted) -> Iterator[Fault]:
    """Everything that is still wrong: in what is asked for, then in what is started."""
    options, ignored = read_directives(text)
    asked = [*_of_devices(options), *_of_limits(options), *_of_files(options)]
    hidden = []
    for line, why, hint in ignored:
        name = re.search(r"--([\w-]+)", line)
        missing = f"--{name[1] if name else ''} is missing"
        is_needed = missing in {seen for seen, *_ in asked} or not line.startswith("##")
        if name and name[1] not in options and is_needed:
            hidden.append(missing)
            yield f"sbatch does not read the line {line!r}", why, hint
    yield from (fault for fault in asked if fault[0] not in hidden)
    tasks = _tasks_per_node(options)
    first = rehearse(text, case.nodes, tasks, case.job)
    if not first.ended:
        yield "the script did not end in the rehearsal", "", "Leave out what waits."
        return
    found = list(_of_starts(first, case))
    yield from found
    if not found:
        second = rehearse(text, case.nodes, tasks, case.other_job)
        yield from _of_ports(first.starts, second.starts, case)


def _compare_start(text: str) -> None:
    """The first line says which program reads the rest."""
    first = text.split("\n")[0]
    if "\r" in text:
        raise Wrong("lines end with \\r\\n", "sbatch refuses that.", "End them with \\n")
    if first.startswith("#!") and "bash" in first:
        return
    why = "The first line says which program reads the rest."
    if text.lstrip().startswith("#!"):
        why = (
            "All that stands between the quotes belongs to the file, also the line break and the "
            "spaces before #!."
        )
    seen = f"the first line is {first[:60]!r}, and sbatch refuses the file"
    raise Wrong(seen, why, 'Begin directly after the quotes: """#!/bin/bash')


# ---- what is asked for ----------------------------------------------------------------------


def _count(options: dict[str, str], name: str, default: int) -> int:
    """A whole number, also behind a type such as h100:4."""
    value = options.get(name, str(default))
    if "$" in value:
        raise Wrong(
            f"sbatch reads --{name}={value} as it stands",
            "#SBATCH lines are read by Slurm, which knows no variables of the shell.",
            "Write the number.",
        )
    if not re.fullmatch(r"(?:[\w.-]+:)*\d+", value):
        raise Wrong(f"sbatch refuses --{name}={value}", "It is no number.", "Write a whole number.")
    return int(value.rpartition(":")[2])


def _num_nodes(options: dict[str, str]) -> int:
    low, dash, high = options.get("nodes", "").partition("-")
    if dash and low != high:
        raise Wrong(f"--nodes={low}-{high}", "Slurm may give any number in this range.", "")
    tasks = _count(options, "ntasks", 1)
    default = tasks // max(1, _count(options, "ntasks-per-node", 1))
    return _count({"nodes": low} if low else {}, "nodes", default)


def _tasks_per_node(options: dict[str, str]) -> int:
    """Tasks that srun starts on each node by itself."""
    if "ntasks-per-node" in options:
        return _count(options, "ntasks-per-node", 1)
    return -(-_count(options, "ntasks", NODES) // max(1, _num_nodes(options)))


def _of_devices(options: dict[str, str]) -> Iterator[Fault]:
    nodes = _num_nodes(options)
    if nodes != NODES:
        yield f"{nodes} nodes are asked for, not {NODES}", "", f"Write --nodes={NODES}"
    advice = f"Write --gpus-per-node={GPUS}"
    gres = [part for part in options.get("gres", "").split(",") if part.split(":")[0] == "gpu"]
    asked = {
        name: _count(options, name, 0)
        for name in ("gpus-per-node", "gpus-per-task")
        if name in options
    }
    if "gpus-per-task" in asked:
        asked["gpus-per-task"] *= _tasks_per_node(options)
    if gres:
        asked["gres"] = 1 if gres[0] == "gpu" else _count({"gres": gres[0]}, "gres", 1)
    for name, number in asked.items():
        if number != GPUS:
            why = f"A node has {GPUS}, and the job is to use all of them."
            yield f"--{name}={options[name]} gives {number} of the GPUs of each node", why, advice
    if not asked and "gpus" in options:
        why = "That counts over the whole job, and Slurm may spread them unevenly over the nodes."
        yield f"--gpus={options['gpus']} names no number per node", why, advice
    elif not asked:
        yield "no GPU is asked for", "A job that asks for no GPU gets none.", advice


def megabytes(size: str) -> float:
    """Slurm's reading of a --mem: megabytes where no letter follows. -1 where it refuses it."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", size, re.IGNORECASE)
    if not found:
        return -1
    return int(found[1]) * 1024.0 ** ("KMGT".index(found[2].upper() or "M") - 1)


def _of_limits(options: dict[str, str]) -> Iterator[Fault]:
    memory = options.get("mem", "")
    size = megabytes(memory) if memory else megabytes(options.get("mem-per-gpu", "0")) * GPUS
    if not MEMORY_MB[0] <= size <= MEMORY_MB[1]:
        why = "A number without a letter is megabytes." if memory.isdigit() else ""
        if memory and not size:
            why = "0 asks for all the memory of a node."
        said = (
            f"--mem={memory} is {size:g} MB, not 64 GB per node" if memory else "--mem is missing"
        )
        yield said, why, "Write --mem=64G"
    form = "Write minutes, or hours:minutes:seconds."
    time = options.get("time", "")
    if not time:
        why = "Without a limit the job gets that of its queue, and waits longer for its turn."
        yield "--time is missing", why, form
        return
    got = minutes_of(time)
    if got is None:
        yield f"sbatch refuses --time={time}", "Slurm takes neither letters nor decimals.", form
    elif got != MINUTES:
        is_pair = time.count(":") == 1 and "-" not in time
        why = "Slurm reads two numbers as minutes and seconds." if is_pair else ""
        if got == 60 * MINUTES:
            why = "That is the same number in hours."
            if ":" not in time:
                why = "That is seconds, but one number is minutes."
        yield f"--time={time} is {got:,} minutes to Slurm, not {MINUTES}", why, form


def _of_files(options: dict[str, str]) -> Iterator[Fault]:
    name = options.get("job-name", "job.sbatch")
    for option, ending in (("output", "out"), ("error", "err")):
        wanted = f"hello-4711.{ending}"
        pattern = options.get(option, "")
        advice = f"Write --{option}=%x-%j.{ending}"
        if not pattern:
            where = "slurm-4711.out" if option == "output" else "the file of --output"
            why = (
                f"What is printed goes to {where} then."
                if option == "output"
                else (f"Errors go to {where} then, among all that the ranks print.")
            )
            yield f"--{option} is missing", why, advice
            continue
        written = file_name(pattern, name)
        if written == wanted:
            continue
        why = ""
        if "$" in pattern:
            why = "Slurm knows no variables of the shell there; %j is the number."
        elif written.rpartition("/")[2] == wanted:
            why = (
                "Slurm makes no folders: where one is missing, the job ends before its first line, "
                "and no file says why."
            )
        seen = f"--{option}={pattern} makes job 4711 write to {written}, not {wanted}"
        yield seen, why, advice


# ---- what is started ------------------------------------------------------------------------


def _of_starts(found: Rehearsal, case: Granted) -> Iterator[Fault]:
    """Once torchrun for each node, with the right numbers."""
    runs = [start for start in found.starts if start.words[0] == "torchrun"]
    bare = [start for start in found.starts if start.words[0] != "torchrun"]
    if not runs and bare:
        why = "Nobody tells these processes their rank: torchrun would set RANK and LOCAL_RANK."
        seen = f"{' '.join(bare[0].words)[:80]!r} is started {len(bare)} times, without torchrun"
        yield seen, why, "Start torchrun, and let it start train.py."
        return
    if not runs:
        said = " ".join(found.said.split())[-160:]
        yield f"nothing is started; bash says {said!r}", "", "Keep the line with torchrun."
        return
    counts = {node: sum(run.node == node for run in runs) for node in case.nodes}
    many = max(counts.values())
    if not all(counts.values()):
        why = (
            "A job file runs on the first node alone, so torchrun there waits for one that never "
            "comes. srun starts a command on every node of the job."
        )
        seen = f"torchrun starts on {_names(counts, 1)} and not on {_names(counts, 0)}"
        yield seen, why, "Write srun torchrun ..."
    elif many > 1:
        why = (
            "srun starts its command once per task, not once per node, and each torchrun starts "
            f"{_flag(runs[0], 'nproc-per-node', '1')} processes."
        )
        seen = f"torchrun starts {many} times on each node, not once"
        yield seen, why, "Write --ntasks-per-node=1"
    yield from _of_numbers(runs[0])


def _names(counts: dict[str, int], least: int) -> str:
    """The nodes with or without a start."""
    return ", ".join(node for node, count in counts.items() if (count > 0) == (least > 0))


def _of_numbers(run: Start) -> Iterator[Fault]:
    processes = _flag(run, "nproc-per-node", "1")
    if processes not in (str(GPUS), "gpu", "auto"):
        why = "The number counts the processes on one node."
        seen = f"--nproc-per-node is {processes}, not {GPUS}"
        yield seen, why, f"Write --nproc-per-node={GPUS}"
    nodes = _flag(run, "nnodes", "1:1")
    if nodes not in (str(NODES), f"{NODES}:{NODES}"):
        why = "Each torchrun then makes a world of its own, and both train the same model alone."
        why = why if nodes in ("1", "1:1") else ""
        yield f"--nnodes is {nodes}, not {NODES}", why, f"Write --nnodes={NODES}"
    if "train.py" not in {Path(word).name for word in run.words}:
        yield "torchrun is not given train.py", "", "The script is the last word of the command."


def _flag(run: Start, name: str, default: str) -> str:
    """The value of an option of torchrun, also with _ in place of - and after a space."""
    words = [word.replace("_", "-") if word.startswith("--") else word for word in run.words]
    for index, word in enumerate(words):
        if word.startswith(f"--{name}="):
            return run.words[index].partition("=")[2]
        if word == f"--{name}":
            return run.words[index + 1] if index + 1 < len(words) else ""
    return default


def meeting_point(run: Start) -> tuple[str, str]:
    """Host and port at which a torchrun meets the others."""
    endpoint = _flag(run, "rdzv-endpoint", "")
    if endpoint:
        host, _, port = endpoint.partition(":")
        return host, port or DEFAULT_PORT
    return _flag(run, "master-addr", ""), _flag(run, "master-port", "29500")


def _of_ports(first: list[Start], second: list[Start], case: Granted) -> Iterator[Fault]:
    """One meeting point for all, on the first node, and another one for another job."""
    runs = [start for start in first if start.words[0] == "torchrun"]
    points = [meeting_point(run) for run in runs]
    host, port = points[0]
    head = 'Ask Slurm: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'
    if len(set(points)) > 1:
        why = "Then nobody meets: the value is worked out on each node, or each time anew."
        seen = " and ".join(":".join(point) for point in points)
        yield f"the nodes meet at {seen}", why, "Work it out once, before srun."
        return
    if host != case.nodes[0]:
        why = f"This job runs on {' and '.join(case.nodes)}, and nobody listens at {host or 'it'}."
        if host in ("localhost", "127.0.0.1"):
            why = "On each node that is the node itself, so the nodes do not meet."
        elif host in case.nodes:
            why = "The node with number 0, the first one, is where torchrun listens."
        yield f"the nodes meet at {host or 'no host'}", why, head
    if not (port.isdigit() and 1024 <= int(port) < 65_536):
        yield f"the port is {port!r}", "Ports from 1024 to 65535 are free to use.", PORT
    elif meeting_point(second[0] if second else runs[0])[1] == port:
        why = "Where both run on one node, the second finds the port taken, or joins the first job."
        yield f"jobs {case.job} and {case.other_job} both use port {port}", why, PORT
    backend = _flag(runs[0], "rdzv-backend", "static")
    ranks = [_flag(run, "node-rank", "0") for run in runs]
    if backend == "static" and sorted(ranks) != [str(node) for node in range(NODES)]:
        why = "Without --rdzv-backend=c10d each torchrun has to be told its number, from 0."
        yield f"the numbers of the nodes are {', '.join(ranks)}", why, "Keep --rdzv-backend=c10d"


PORT = "Make the port of the job's number: port=$((20000 + SLURM_JOB_ID % 10000))"

# ---- Slurm itself, where there is one -------------------------------------------------------


def _ask_slurm(text: str) -> None:
    """Where Slurm answers, hear what it says of the file; a site may refuse any such job."""
    if not shutil.which("sbatch") or _asked("scontrol", "ping"):
        return
    refused = _test_only(text)
    if refused and not _test_only(job_text.mended_job()):
        raise Wrong(
            f"sbatch --test-only refuses the file: {refused}",
            "A line was not asked for, or this site does not know it.",
            "Leave out what the docstring does not name.",
        )


def _test_only(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sbatch"
        path.write_text(text)
        return _asked("sbatch", "--test-only", str(path))


def _asked(*command: str) -> str:
    """Empty where Slurm agrees, else the first line of what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return type(problem).__name__
    lines = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
    return lines[0] if done.returncode else ""


# ---- the spec -------------------------------------------------------------------------------

mended_job = Spec(
    todo="0.4",
    truth=job_text.mended_job,
    cases=grants,
    observe=job_seen,
    tell=lambda case: "the job file",
    limit_s=20.0,  # Slurm may take its time, and both texts are asked about
    mistake_s=4.0,
    hints=(
        "Go through it from the top. How many torchruns start, and on how many nodes? How much is "
        "--mem=64, and how long --time=01:30? Which #SBATCH line stands below a command?",
        "Three faults are in the last command: nothing starts it on the second node, its host "
        "belongs to another job, and its port is the same for every job.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) is the first node, '
        "port=$((20000 + SLURM_JOB_ID % 10000)) a port of the job's own; then "
        "srun torchrun ... --rdzv-endpoint=$head:$port train.py",
    ),
    mistakes=r"""
        --ntasks-per-node=1 => --ntasks-per-node=4 ::
            Each task is a torchrun, and each torchrun starts the processes of a node.
        --gpus-per-node=4 => --gpus-per-node=1 :: The number counts the GPUs of one node.
        --mem=64G => --mem=64 :: A number without a letter is megabytes.
        --time=01:30:00 => --time=01:30 :: Slurm reads two numbers as minutes and seconds.
        --output=%x-%j.out => --output=logs/%x-%j.out ::
            Slurm makes no folders, and without the folder there is no job and no message.
        #SBATCH --error=%x-%j.err\n => \n :: Errors go where everything else goes.
        srun torchrun => torchrun :: Nothing starts torchrun on the second node.
        srun torchrun => srun --nodes=1 --ntasks=1 torchrun :: srun is told to use one node.
        endpoint=$head:$port => endpoint=g07:$port ::
            Slurm chooses the nodes, so no name of a node can stand in a job file.
        endpoint=$head:$port => endpoint=$head:29500 :: The port is the same for every job.
        --nproc-per-node=4 => --nproc-per-node=8 :: The number counts the processes on one node.
        --nnodes=2 => --nnodes=1 :: Each node would train alone.
    """,
    module=globals(),
)
