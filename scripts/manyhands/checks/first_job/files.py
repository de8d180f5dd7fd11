"""0.5: a job file, read as sbatch reads it; Slurm itself is asked where there is one.

Many texts are right, so a text is judged by rules, and what a rule says is a fact of the text.
"""

import difflib
import math
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.mistakes import mistakes
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed
from manyhands.first_job import planning

# ---- 0.5 ------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The arguments of job_file."""

    name: str
    nodes: int
    gpus_per_node: int
    minutes: int
    command: str

    def __str__(self) -> str:
        return f"job_file({self.name!r}, {self.nodes}, {self.gpus_per_node}, {self.minutes}, ...)"


JOB_HINTS = (
    "The first line is #!/bin/bash. Then come lines such as #SBATCH --nodes=2, from the very "
    "beginning of the line. The command is the last line.",
    "Six of them: --job-name, --nodes, --ntasks-per-node=1, --gpus-per-node, --time, --output.",
    "Slurm reads --time=90 as minutes, 90:00 as minutes and seconds, and 01:30:00 as hours, "
    "minutes and seconds.",
    'Begin with f"""#!/bin/bash and let every line start at the margin: what stands between the '
    "quotes is the file, spaces and line breaks as well.",
)


def requests() -> list[Request]:
    """One node, two, several; minutes, hours and days; commands with quotes, braces and signs."""
    torchrun = "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu train.py"
    return [
        Request("first_job", 2, 4, random.randrange(62, 110), torchrun),
        Request("big-1", random.randrange(3, 9), 8, 60 * random.randrange(25, 30), "bash run.sh"),
        Request("try", 1, 1, random.randrange(5, 50), "python -c \"print(f'{1 + 1:%}')\""),
        Request("weekend", 2, 1, 60 * random.randrange(2, 20) + 5, "exec bash launch.sh a.py b"),
    ]


def job_seen(answer, request: Request) -> str:
    """The text of a job, read as sbatch reads it; and by sbatch, where there is one."""
    text = answer(*request)
    if not isinstance(text, str):
        raise malformed(text, "the text of the file", "Return the text; do not print or write it.")
    try:
        _compare_job(text, request)
        if request.name == "first_job":  # one question to Slurm is enough
            _ask_slurm(text, request)
    except Wrong as wrong:
        raise Wrong(wrong.seen.removeprefix(f"{request}: "), wrong.why, wrong.hint) from None
    return "accepted"


def _compare_job(text: str, request: Request) -> None:
    _compare_start(text, request)
    if left := re.search(r"\{(name|nodes|gpus_per_node|minutes|command)\b[^}\n]*\}", text):
        raise Wrong(
            f"{request}: the text still holds {left[0]}",
            "A text without f in front keeps its braces.",
            'Put an f before the quotes: f"""...',
        )
    options, ignored = read_directives(text)
    for wrong in (_of_nodes, _of_gpus, _of_time, _of_names):
        for name, seen, why, advice in wrong(options, request):
            lost = [reason for line, *reason in ignored if name in line]
            where = f"{request}: {seen}" + (f", though a line holds {name}" if lost else "")
            raise Wrong(where, *(lost[0] if lost else (why, advice)))
    _compare_command(text, request)


def _compare_start(text: str, request: Request) -> None:
    first = text.split("\n")[0]
    if "\r" in text:
        raise Wrong(
            f"{request}: lines end with \\r\\n", "sbatch refuses that.", "End them with \\n"
        )
    if first.startswith("#!") and "SBATCH" in first:
        seen = f"{request}: all stands in one line, {first[:60]!r}..."
        raise Wrong(seen, "Nothing breaks the lines.", "Write '\\n'.join(lines), with one \\ only.")
    if first.startswith("#!") and "bash" in first:
        return
    if first.startswith("#!"):
        raise Wrong(f"{request}: the first line is {first!r}", "", "Begin with #!/bin/bash")
    if text.lstrip().startswith("#!"):
        raise Wrong(
            f"{request}: the first line is {first!r}, and sbatch refuses the file: 'This does not "
            "look like a batch script'",
            "All that stands between the quotes belongs to the file, also the line break and the "
            "spaces before #!.",
            'Begin directly after the quotes: """#!/bin/bash',
        )
    raise Wrong(
        f"{request}: the first line is {first!r}, and sbatch refuses the file",
        "The first line says which program reads the rest.",
        "Begin with #!/bin/bash",
    )


# What sbatch takes, in 22.05 and later: options with a value, and those with none or with one that
# may follow a =.
VALUED = """account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
deadline delay-boot dependency distribution error exclude export export-file extra extra-node-info
gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile qos
reservation segment signal sockets-per-node switches tasks-per-node thread-spec threads-per-core
time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap""".split()
PLAIN = """contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue oom-kill-step
overcommit oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only
use-min-nodes verbose wait""".split()
SHORT = dict(
    zip(
        "aAbcCdDeFGiJLmMnNopqStwxBHkOQsvW",
        "array account begin cpus-per-task constraint dependency chdir error nodefile gpus input "
        "job-name licenses distribution clusters ntasks nodes output partition qos core-spec time "
        "nodelist exclude extra-node-info hold no-kill overcommit quiet oversubscribe verbose "
        "wait".split(),
        strict=True,
    )
)


PLACEHOLDER = "<...> stands for something: in Slurm %x is the job's name and %j its number."


def read_directives(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """What sbatch reads in a job file: long names and values of its options, the last one of each.

    Also returns the lines that look like options but are none to sbatch: line, why, hint.

    Raises:
        Wrong: sbatch refuses a line.
    """
    options: dict[str, str] = {}
    ignored: list[tuple[str, str, str]] = []
    command = ""
    for line in text.split("\n"):
        if line.startswith("#SBATCH") and not command:
            options |= _options_of(line)
        elif re.match(r"[\s#]*SBATCH\b", line, re.IGNORECASE):
            ignored.append((line, *_why_ignored(line, command)))
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or line.strip()
    return options, ignored


def _why_ignored(line: str, command: str) -> tuple[str, str]:
    if line.startswith("#SBATCH"):
        return (
            f"Slurm stops reading at the first command, which is {command!r}.",
            "Put all #SBATCH lines before it.",
        )
    if line.startswith((" ", "\t")):
        return (
            f"{line.split('=')[0]!r} begins with a space, so Slurm takes it for a comment.",
            "Begin each line at the margin, without indentation inside the quotes.",
        )
    word = re.match(r"[#\s]*\w+", line)[0]
    what = "a comment" if "#" in word else "no option"
    return f"{word!r} is {what} to Slurm.", "Write #SBATCH: one #, no space, capital letters."


def _options_of(line: str) -> dict[str, str]:
    """The options on one #SBATCH line, as getopt takes them apart."""
    try:  # a \\ at the end is nothing to sbatch, and the next line a command
        words = shlex.split(line.removeprefix("#SBATCH").removesuffix("\\"), comments=True)
    except ValueError:
        raise Wrong(f"{line!r}: a quote is not closed", "", "Close it, or leave it out.") from None
    options = {}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _long_name(name, line)
        elif word.startswith("-") and word[1:].partition("=")[0] in VALUED:
            why = f"After one dash only the letter {word[1]} is read as the option."
            raise Wrong(f"sbatch refuses {line!r}", why, f"Write two dashes: -{word}")
        elif word[:1] == "-" and word[1:2] in SHORT:
            name, equals, value = SHORT[word[1]], word[2:], word[2:]
            if name in PLAIN and value:  # several letters behind one -
                words.insert(0, f"-{value}")
        else:
            why = "Spaces around = split an option in two." if "=" in line else ""
            why = PLACEHOLDER if "<" in line else why
            seen = f"sbatch refuses {line!r}: {word!r} is no option"
            raise Wrong(seen, why, "Write --name=value in one piece.")
        if name in VALUED and not equals:
            value = words.pop(0) if words else ""
        if name in VALUED and value in ("", "="):
            why = "An option is one piece, without spaces around =."
            raise Wrong(
                f"sbatch refuses {line!r}: --{name} has no value", why, "Write --name=value"
            )
        options[name] = value
    return options


def _long_name(name: str, line: str) -> str:
    """The option that a long name, or its beginning, stands for."""
    known = [*VALUED, *PLAIN]
    meant = [one for one in known if one.startswith(name)]
    if name in known or len(meant) == 1:
        name = name if name in known else meant[0]
        return "ntasks-per-node" if name == "tasks-per-node" else name
    near = difflib.get_close_matches(name, known, 1, 0.5)
    advice = f"Write --{near[0]}" if near else "Look it up with: man sbatch"
    raise Wrong(f"sbatch refuses {line!r}: it has no option --{name}", "", advice)


Fault = tuple[str, str, str, str]  # the option, what is seen, why, what to try


def _count(value: str, name: str) -> int:
    """A whole number, also behind a type such as h100:4."""
    if "$" in value:
        raise Wrong(
            f"sbatch reads --{name}={value} as it stands",
            "#SBATCH lines are read by Slurm, which knows no variables of the shell.",
            "Let Python put the number in.",
        )
    if not re.fullmatch(r"(?:[\w.-]+:)*\d+", value):
        raise Wrong(
            f"sbatch refuses --{name}={value}", "It is not a number.", "Write a whole number."
        )
    return int(value.rpartition(":")[2])


def _of_nodes(options: dict, request: Request) -> Iterable[Fault]:
    """Nodes, and tasks on each of them; Slurm's own default is one task a node."""
    per_node = _count(options.get("ntasks-per-node", "1"), "ntasks-per-node")
    all_tasks = _count(options["ntasks"], "ntasks") if "ntasks" in options else None
    nodes = options.get("nodes", str((all_tasks or 1) // max(per_node, 1)))
    low, dash, high = nodes.partition("-")
    if dash and low == high:
        nodes = low
    if nodes.partition("-")[1] and re.fullmatch(r"\d+-\d+", nodes):
        why = "Slurm may give any number of nodes in this range."
        yield "--nodes", f"--nodes={nodes}", why, "Write one number."
    elif _count(nodes, "nodes") != request.nodes:
        said = f"--nodes={nodes}" if "nodes" in options else "--nodes is missing, so 1"
        yield "--nodes", f"{said}, not {request.nodes}", "", "Write --nodes={nodes}"
    if all_tasks is not None and all_tasks < request.nodes:
        why = f"A node without a task is not given, so {all_tasks} of {request.nodes} are left."
        yield "--ntasks", f"--ntasks={all_tasks} counts over the whole job", why, "Leave it out."
    if all_tasks is not None and all_tasks != request.nodes:
        per_node = all_tasks / request.nodes
    if per_node == 0:
        yield "--ntasks", "no task per node is asked for", "", "Write --ntasks-per-node=1"
    if per_node != 1:
        yield (
            "--ntasks",
            f"Slurm would start {per_node:g} tasks on each of the {request.nodes} nodes, not 1",
            f"Each task is a torchrun, and each torchrun starts a process for each of the "
            f"{request.gpus_per_node} GPUs: {per_node * request.gpus_per_node:g} processes per "
            "node.",
            "Write --ntasks-per-node=1",
        )


def _of_gpus(options: dict, request: Request) -> Iterable[Fault]:
    wanted, nodes = request.gpus_per_node, request.nodes
    gres = [part for part in options.get("gres", "").split(",") if part.split(":")[0] == "gpu"]
    asked = {name: options[name] for name in ("gpus-per-node", "gpus-per-task") if name in options}
    asked |= {"gres": gres[0]} if gres else {}
    for name, value in asked.items():
        number = 1 if value == "gpu" else _count(value, name)
        why = (
            f"{number} is what all {nodes} nodes have together." if number == wanted * nodes else ""
        )
        if number != wanted:
            seen = f"--{name}={value} asks for {number} on each node, not {wanted}"
            yield (
                f"--{name}",
                seen,
                why,
                "Give the GPUs of one node: --gpus-per-node={gpus_per_node}",
            )
    if not asked and "gpus" in options:
        yield (
            "--gpus",
            f"--gpus={options['gpus']} counts over the whole job",
            "Slurm may spread them unevenly over the nodes.",
            "Write --gpus-per-node={gpus_per_node}",
        )
    elif not asked:
        why = "A job that asks for no GPU gets none."
        advice = "Write --gpus-per-node={gpus_per_node}"
        yield "--gpus-per-node", "no GPU is asked for", why, advice


def minutes_of(time: str) -> int | None:
    """Slurm's minutes of a --time; None where sbatch refuses it. Seconds are rounded up."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(re.fullmatch(r"\d+", part) for part in [*parts, *([days] if dash else [])]):
        return None
    if len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes, minutes:seconds
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return math.ceil(int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60)


def _of_time(options: dict, request: Request) -> Iterable[Fault]:
    form = "Write minutes, or hours:minutes:seconds with minutes // 60 and minutes % 60."
    if "time" not in options:
        why = "Without a limit the job gets that of its queue, and waits longer for its turn."
        yield "--time", "--time is missing", why, form
        return
    time, wanted = options["time"], request.minutes
    got = minutes_of(time)
    if got is None:
        why = "Slurm accepts no letters and no decimals there."
        if "$" in time:
            why = "Slurm knows no variables of the shell there."
        yield "--time", f"sbatch refuses --time={time}", why, form
    elif got != wanted:
        why = ""
        if got == wanted * 60:
            why = "That is the same number in hours."
            if ":" not in time:
                why = "That is seconds, but one number is minutes."
        elif got == 0:
            why = "0 means no limit at all."
        elif time.count(":") == 1 and "-" not in time:
            why = "Slurm reads two numbers as minutes and seconds."
        elif got == wanted // 60 * 60:
            why = "The minutes beyond whole hours are lost."
        elif got == wanted % 60:
            why = "The whole hours are lost."
        yield "--time", f"--time={time} is {got:,} minutes to Slurm, not {wanted:,}", why, form


def _of_names(options: dict, request: Request) -> Iterable[Fault]:
    name, output = options.get("job-name", ""), options.get("output", "slurm-%j.out")
    if name != request.name:
        said = f"--job-name={name}" if name else "--job-name is missing"
        why = "Without it the job is named after its file." if not name else ""
        yield "--job-name", f"{said}, not {request.name}", why, "Write --job-name={name}"
    wanted = f"{request.name}-4711.out"
    if (written := file_name(output, name)) != wanted:
        why = ""
        if "output" not in options:
            why = "Without --output the file is slurm-<number>.out, whatever job wrote it."
        elif "<" in output:
            why = PLACEHOLDER
        elif "$" in output:
            why = "Slurm knows no variables of the shell there; %j is the number."
        elif written.rpartition("/")[2] == wanted:
            why = "Slurm makes no folders: where one is missing, the job ends without a word."
        elif "%%" in output:
            why = "%% stands for the sign %; in an f-string % needs no doubling."
        yield (
            "--output",
            f"--output={output} makes job 4711 write to {written}, not {wanted}",
            why,
            "Write --output=%x-%j.out",
        )
    if "error" in options and file_name(options["error"], name) != wanted:
        why = "Error messages would go to another file."
        yield "--error", f"--error={options['error']}", why, "Leave it out: --output takes both."


def file_name(pattern: str, name: str) -> str:
    """The file that Slurm writes for a pattern, in job 4711."""
    values = {"x": name, "j": "4711", "A": "4711", "%": "%"}
    text = re.sub(r"%([xjA%])", lambda found: values[found[1]], pattern)
    return text.removeprefix("./")


AS_GIVEN = "Let the last line be the command, as it is given."


def _compare_command(text: str, request: Request) -> None:
    body = [line.strip() for line in text.split("\n")]
    body = [line for line in body if line and not line.startswith("#")]
    command = request.command
    if body.count(command) == 1 and body[-1] == command:
        return
    near = [line for line in body if command in line]
    if not near:
        seen = f"no line holds the command {command!r}"
        raise Wrong(f"{request}: {seen}", "", AS_GIVEN)
    if len(near) > 1:
        raise Wrong(f"{request}: the command stands there {len(near)} times", "", "Write it once.")
    why = ""
    if near[0] == command:
        why = "A job ends as its last command does, so where training fails it counts as completed."
    elif near[0].endswith("&"):
        why = "The job is over when its script ends, and & lets the script go on at once."
    elif near[0].startswith(("srun", "torchrun", "python", "bash")):
        why = "The command is complete: it brings its own srun where it needs one."
    elif near[0].startswith("exec"):
        why = "exec would do no harm, but what to run is for the caller to say."
    raise Wrong(
        f"{request}: the script is {'; '.join(body)}, and the command {command!r}"[:300],
        why,
        AS_GIVEN,
    )


def _ask_slurm(text: str, request: Request) -> None:
    """Where Slurm answers, hear what it says of the file; a site may refuse any such job."""
    if not shutil.which("sbatch") or _asked("scontrol", "ping"):
        return
    refused = _test_only(text)
    if refused and not _test_only(planning.job_file(*request)):
        raise Wrong(
            f"{request}: sbatch --test-only refuses the file: {refused}",
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

job_file = Spec(
    todo="0.5",
    truth=planning.job_file,
    cases=requests,
    observe=job_seen,
    tell=str,
    limit_s=15.0,  # Slurm may take its time, and both texts are asked about
    hints=JOB_HINTS,
    mistakes=mistakes(
        r"""
        #SBATCH --ntasks-per-node=1 => #SBATCH --ntasks-per-node={gpus_per_node}
            A task is started for each GPU, and torchrun starts the processes itself.
        {minutes // 60:02}:{minutes % 60:02}:00 => {minutes}:00:00
            The minutes are written where Slurm reads hours.
        #SBATCH --nodes={nodes} => # SBATCH --nodes={nodes}
            Slurm reads a line only if it begins with #SBATCH.
        --gpus-per-node={gpus_per_node} => --gpus-per-node={nodes * gpus_per_node}
            These are the GPUs of all nodes.
        --output=%x-%j.out => --output={name}.out
            Two jobs of that name would write into one file.
        """,
        {},
    ),
)
