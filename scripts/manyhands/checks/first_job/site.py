"""0.6: a site file, read by a bash that knows nothing else."""

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed
from manyhands.first_job import site

# ---- 0.6 ------------------------------------------------------------------------------------

TRUTH = {
    "SBATCH_ACCOUNT": "class",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_GPUS_PER_NODE": "4",
    "NCCL_SOCKET_IFNAME": "ib0",
    "HEAD_SUFFIX": "-ib",
}
MODULES = {"Python": "Python/3.12", "CUDA": "CUDA/12.8"}
LURES: dict[str, dict[str, tuple[str, str]]] = {  # of a variable: wrong values, why and hint
    "SBATCH_ACCOUNT": {
        "home": ("That account may use the partition cpu only.", "Look at the column Partition."),
        "student": (
            "That is your own name; the time is charged to an account.",
            "Look at the first column.",
        ),
        "gpu": ("That is a partition.", "The account stands in the first column."),
    },
    "SBATCH_PARTITION": {
        "cpu": (
            "The column GRES shows (null): its nodes have no GPU.",
            "Look at the column GRES.",
        ),
        "cpu*": (
            "Its nodes have no GPU, and the * only marks the default partition.",
            "Look at the column GRES.",
        ),
        "gpu*": (
            "The * is not part of the name: sinfo marks the default partition with it.",
            "Write gpu",
        ),
        "gpu-test": (
            "This partition ends every job after 30 minutes.",
            "Look at the column TIMELIMIT.",
        ),
        "gpu,gpu-test": (
            "gpu-test ends every job after 30 minutes.",
            "Name only the partition with the longer limit.",
        ),
    },
    "SBATCH_GPUS_PER_NODE": {
        "48": (
            "Those are the GPUs of all 12 nodes of the partition.",
            "Give the number for one node.",
        ),
        "12": (
            "That is the number of nodes.",
            "The number of GPUs is the last part of gpu:h100:4.",
        ),
        "2": (
            "That is what a node of gpu-test has.",
            "The number of GPUs is the last part of gpu:h100:4.",
        ),
        "gpu:h100:4": ("That is the form that --gres takes.", "Give the number alone."),
        "100": ("h100 is the kind of GPU.", "Take the number after the last colon."),
        "h100": ("h100 is the kind of GPU.", "Take the number after the last colon."),
    },
    "NCCL_SOCKET_IFNAME": {
        "eth0": (
            "At 10 Gbit/s instead of 400, training would wait for gradients.",
            "Choose the fastest network.",
        ),
        "lo": (
            "A node's loopback interface reaches no other node.",
            "Choose the fastest network between nodes.",
        ),
        "InfiniBand": (
            "InfiniBand is the kind of network, not its name on a node.",
            "The name stands in the first column.",
        ),
        "ib0,eth0": ("Only one network is asked for, the fastest.", "Write ib0 alone."),
    },
    "HEAD_SUFFIX": {
        "ib": (
            "g14 and ib make g14ib, which is no node's name.",
            "Include what stands between g14 and ib.",
        ),
        "ib0": (
            "That is the name of a network on the node, not part of the node's name.",
            "See what getent answers.",
        ),
        "i": ("On that network the node is called g14-ib.", "See what getent answers."),
    },
}


SITE_HINTS = (
    "Read SITE from above: the queue needs GPUs and a day; the account has to be one that may use "
    "that queue; the number of GPUs is that of one node.",
    "A line is export NAME=value, without spaces around =. The last line is module load with two "
    "names from the list.",
    "The network is the one with 400 Gbit/s, and getent shows the node g14 by its name there: "
    "g14-ib.",
)


def site_seen(answer, case: tuple) -> str:
    """The text, read by a bash that knows nothing else; its variables and what it loads."""
    seen = _site_seen(answer())
    _compare_shell(seen)
    for name, wanted in TRUTH.items():
        _compare_variable(name, seen["variables"][name], wanted, seen["text"])
    for name in sorted(set(seen["others"]) - set(TRUTH)):
        raise Wrong(
            f"{name} is set as well",
            "An SBATCH_ variable overrules that line in every job file.",
            "Leave it out.",
        )
    _compare_modules(seen["modules"])
    return "accepted"


READ_SITE = r"""
names=("$@")
module() { printf '%s\n' "$*" >>modules; }
ml() { module load "$@"; }
. ./site.env >/dev/null
for name in "${names[@]}"; do
    printf '%s\0%s\0%s\0%s\0' "$name" "${!name+set}" "${!name-}" "$(printenv "$name")"
done
printf 'others\0%s\0\0\0' "${!SBATCH_@}"
"""


def _site_seen(text: object) -> dict:
    """What a clean bash makes of the text."""
    if not isinstance(text, str):
        raise malformed(text, "the text of the file", "Return six lines as one text.")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "site.env").write_bytes(text.encode(errors="replace"))
        bash = shutil.which("bash") or "bash"
        command = [bash, "--noprofile", "--norc", "-c", READ_SITE, "bash", *TRUTH]
        environ = {"PATH": os.defpath, "USER": "student", "HOME": folder, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=3,
            )
        except subprocess.TimeoutExpired:
            return {"text": text, "ended": False, "said": ""}
        modules = Path(folder, "modules")
        loaded = modules.read_text().splitlines() if modules.is_file() else []
    parts = done.stdout.decode(errors="replace").split("\0")
    rows = {parts[i]: parts[i + 1 : i + 4] for i in range(0, len(parts) - 3, 4)}
    return {
        "text": text,
        "ended": "others" in rows,
        "said": done.stderr.decode(errors="replace"),
        "others": rows.pop("others", [""])[0].split(),
        "variables": rows,
        "modules": loaded,
    }


def _compare_shell(seen: dict) -> None:
    """Was bash content with every line?"""
    if "\r" in seen["text"]:
        why = "To bash the \\r is part of the value."
        raise Wrong("lines end with \\r\\n", why, "End them with \\n")
    found = re.search(r"\./site\.env: (?:line (\d+): )?(.*)", seen["said"])
    if found:
        number, said = int(found[1] or 0), found[2].strip()
        line = seen["text"].split("\n")[number - 1].strip() if number else ""
        raise Wrong(f"bash, in line {number} ({line}): {said}"[:250], *_why_bash(line, said))
    if not seen["ended"]:
        why = "A command in the file ends the shell that reads it, as exit does, or never returns."
        raise Wrong("bash did not reach the end of the file", why, "Write only the six lines.")


def _why_bash(line: str, said: str) -> tuple[str, str]:
    if re.match(r"(export\s+)?\w+(\s+=|=\s)", line):
        return "bash allows no space around =.", "Write export NAME=value"
    if line.startswith(("setenv", "set ")):
        return "setenv belongs to another shell, csh.", "Write export NAME=value"
    if re.match(r"\w+\s*:", line):
        return "That is the form of a YAML file.", "Write export NAME=value"
    if line.startswith(("$", ">")):
        return "The $ before a command is the prompt, not part of it.", "Leave it out."
    if "syntax error" in said or "unexpected" in said:
        return "A quote or bracket is not closed, or bash reads it as its own.", "Write NAME=value"
    if "command not found" in said or "No such file" in said:
        return "bash takes the first word for a program.", "Write export NAME=value"
    return "", "Write export NAME=value, one on each line."


def _compare_variable(name: str, row: list[str], wanted: str, text: str) -> None:
    is_set, value, exported = row
    if not is_set:
        near = difflib.get_close_matches(name, re.findall(r"(\w+)=", text), 1, 0.75)
        why = f"The file sets {near[0]} instead." if near else ""
        if re.search(rf"^\s*set\s+{name}=", text, re.MULTILINE):
            why = "`set` gives bash arguments, not variables."
        elif "#SBATCH" in text:
            why = "#SBATCH lines are for job files; to bash they are comments."
        raise Wrong(f"{name} is not set", why, f"Write export {name}=...")
    if value != exported:
        raise Wrong(
            f"{name} is {value!r} in the shell, but not for a program that it starts",
            "sbatch receives only exported variables.",
            f"Write export {name}={value}",
        )
    if value == wanted or _is_as_good(name, value):
        return
    why, advice = LURES[name].get(value, ("", "Look for it in SITE."))
    if not value:
        why = "Nothing stands directly after =, and bash allows no space around it."
        advice = f"Write export {name}=value"
    elif name == "HEAD_SUFFIX" and value.endswith(wanted):
        why = "That is one node's whole name, and the suffix is appended to every node's name."
        advice = "Write only the ending."
    elif "#" in value:
        why = "A comment needs a space before its #."
        advice = f"Write export {name}={value.split('#')[0]}"
    elif re.search(r"\d+\.\d+\.\d+", value):
        why = "Every node has another address, so an address fits only one of them."
        advice = "Write the network's name."
    elif not value.isascii():
        why = "It holds a character that no keyboard types, such as a curly quote."
        advice = "Type it again."
    elif value.strip("\"' ") == wanted or value.lower() == wanted:
        why = "Spaces, quotes and capital letters count."
        advice = f"Write export {name}={wanted}"
    raise Wrong(f"{name} is {value!r}", why, advice)


def _is_as_good(name: str, value: str) -> bool:
    """Values that Slurm and NCCL take for the same."""
    if name != "NCCL_SOCKET_IFNAME":
        return name == "SBATCH_GPUS_PER_NODE" and value == "h100:4"
    # NCCL takes beginnings of names, with = whole names, and with ^ those to leave out.
    names, whole = value.lstrip("^=").split(","), "=" in value
    found = {
        network
        for network in ("lo", "eth0", "ib0")
        if any(network == one if whole else one and network.startswith(one) for one in names)
    }
    return found == ({"lo", "eth0"} if value.startswith("^") else {"ib0"})


def _compare_modules(calls: list[str]) -> None:
    loaded: list[str] = []
    for call in calls:
        verb, *names = call.split()[:1] + call.split()[1:]
        if verb in ("load", "add", "try-load"):
            loaded += names
        elif verb in ("unload", "rm"):
            loaded = [name for name in loaded if name not in names]
        elif verb == "purge":
            loaded = []
    seen = f"loaded: {', '.join(loaded) or 'nothing'}"
    if calls and not loaded:
        verb = calls[-1]
        why = "The command module needs to be told what to do."
        raise Wrong(f"`module {verb}` loads nothing", why, "Write module load NAME")
    for short, whole in MODULES.items():
        if not {short, whole} & set(loaded):
            near = [name for name in loaded if name.lower().startswith(short.lower())]
            why = f"{near[0]} is not in the list that SITE shows." if near else ""
            advice = f"Write module load {' '.join(TO_LOAD)}"
            raise Wrong(f"{seen}; {whole} is missing", why, advice)
    if strange := set(loaded) - set(MODULES) - set(MODULES.values()):
        raise Wrong(f"{seen}; there is no {min(strange)}", "", "See `module avail` in SITE.")


TO_LOAD = tuple(MODULES.values())


site_file = Spec(
    todo="0.6",
    truth=site.site_file,
    cases=lambda: [()],
    observe=site_seen,
    tell=lambda case: "site_file()",
    hints=SITE_HINTS,
    reasons="""
        invalid syntax :: Lines of a shell are not Python. | Put them in quotes and return the text.
    """,
    mistakes="""
        HEAD_SUFFIX=-ib => HEAD_SUFFIX=ib :: The suffix lacks its hyphen.
        SBATCH_GPUS_PER_NODE=4 => SBATCH_GPUS_PER_NODE=8 ::
            That is not the number of GPUs of one node.
        export SBATCH_PARTITION=gpu => SBATCH_PARTITION=gpu ::
            Without `export` the variable is not seen by sbatch.
    """,
    module=globals(),
)
