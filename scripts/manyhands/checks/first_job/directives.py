"""Job files, read as sbatch reads them: its options, and the lines that it does not see."""

import difflib
import math
import re
import shlex

from manyhands.checks.engine.card import Wrong

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


def file_name(pattern: str, name: str) -> str:
    """The file that Slurm writes for a pattern, in job 4711."""
    values = {"x": name, "j": "4711", "A": "4711", "%": "%"}
    text = re.sub(r"%([xjA%])", lambda found: values[found[1]], pattern)
    return text.removeprefix("./")
