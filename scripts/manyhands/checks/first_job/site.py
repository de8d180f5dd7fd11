"""0.6: a site file, read by a bash that knows nothing else."""

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.mistakes import mistakes
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed
from manyhands.first_job import planning

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
        "home": ("that account may use the partition cpu only", "look at the column Partition"),
        "student": ("that is your own name; the time is charged to an account", "first column"),
        "gpu": ("that is a partition", "the account stands in the first column"),
    },
    "SBATCH_PARTITION": {
        "cpu": ("its GRES are (null): it has no GPU", "look at the column GRES"),
        "cpu*": ("it has no GPU; and the * only marks the default queue", "look at GRES"),
        "gpu*": ("no partition has a * in its name: sinfo marks the default with it", "gpu"),
        "gpu-test": ("it ends every job after 30 minutes", "look at the column TIMELIMIT"),
        "gpu,gpu-test": ("gpu-test ends every job after 30 minutes", "one queue: the longer one"),
    },
    "SBATCH_GPUS_PER_NODE": {
        "48": ("those are the GPUs of all 12 nodes of the partition", "of one node"),
        "12": ("that is the number of nodes", "the last part of gpu:h100:4"),
        "2": ("that is what a node of gpu-test has", "the last part of gpu:h100:4"),
        "gpu:h100:4": ("that is the form of --gres", "the number alone"),
        "100": ("h100 is the kind of GPU", "the number behind the last colon"),
        "h100": ("h100 is the kind of GPU", "the number behind the last colon"),
    },
    "NCCL_SOCKET_IFNAME": {
        "eth0": ("10 Gbit/s against 400: training would wait for gradients", "the fastest network"),
        "lo": ("a node's own loopback leads to no other node", "the fastest between nodes"),
        "InfiniBand": ("that is the kind of network, not its name on a node", "the first column"),
        "ib0,eth0": ("one network is asked for, the fastest", "ib0 alone"),
    },
    "HEAD_SUFFIX": {
        "ib": ("g14 and ib make g14ib, which is no node's name", "what stands between g14 and ib"),
        "ib0": ("that is the network's name on a node, not a name of the node", "see getent"),
        "i": ("the node is called g14-ib there", "see what getent answers"),
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
        why = "bash takes the \\r for a part of the value"
        raise Wrong("lines end with \\r\\n", why, "end them with \\n")
    found = re.search(r"\./site\.env: (?:line (\d+): )?(.*)", seen["said"])
    if found:
        number, said = int(found[1] or 0), found[2].strip()
        line = seen["text"].split("\n")[number - 1].strip() if number else ""
        raise Wrong(f"bash, in line {number} ({line}): {said}"[:250], *_why_bash(line, said))
    if not seen["ended"]:
        why = "the file ends the shell that reads it (exit?), or never ends"
        raise Wrong("bash did not come to the end of the file", why, "only the six lines")


def _why_bash(line: str, said: str) -> tuple[str, str]:
    if re.match(r"(export\s+)?\w+(\s+=|=\s)", line):
        return "bash wants no space around =", "export NAME=value"
    if line.startswith(("setenv", "set ")):
        return "setenv belongs to another shell (csh)", "export NAME=value"
    if re.match(r"\w+\s*:", line):
        return "that is the form of a YAML file", "export NAME=value"
    if line.startswith(("$", ">")):
        return "the $ before a command is the prompt, not a part of it", "leave it out"
    if "syntax error" in said or "unexpected" in said:
        return "a quote or a bracket that is not closed, or one that bash reads", "NAME=value"
    if "command not found" in said or "No such file" in said:
        return "bash takes the first word for a program", "export NAME=value; module load NAME"
    return "", "export NAME=value, one a line"


def _compare_variable(name: str, row: list[str], wanted: str, text: str) -> None:
    is_set, value, exported = row
    if not is_set:
        near = difflib.get_close_matches(name, re.findall(r"(\w+)=", text), 1, 0.75)
        why = f"there is {near[0]}" if near else ""
        if re.search(rf"^\s*set\s+{name}=", text, re.MULTILINE):
            why = "`set` gives bash arguments, no variables"
        elif "#SBATCH" in text:
            why = "#SBATCH lines are for job files; to bash they are comments"
        raise Wrong(f"{name} is not set", why, f"export {name}=...")
    if value != exported:
        raise Wrong(
            f"{name} is {value!r} in the shell, but not for a program that it starts",
            "only exported variables are handed on to sbatch",
            f"export {name}={value}",
        )
    if value == wanted or _is_as_good(name, value):
        return
    why, advice = LURES[name].get(value, ("", "look for it in SITE"))
    if not value:
        why = "nothing stands right behind =: bash wants no space around it"
        advice = f"export {name}=value"
    elif name == "HEAD_SUFFIX" and value.endswith(wanted):
        why, advice = "that is one node's whole name; it is added to each name", "only the ending"
    elif "#" in value:
        why, advice = "a comment needs a space before #", f"export {name}={value.split('#')[0]}"
    elif re.search(r"\d+\.\d+\.\d+", value):
        why, advice = "an address is another one on every node", "the network's name"
    elif not value.isascii():
        why, advice = "a sign that is not on a keyboard, such as a curly quote", "type it anew"
    elif value.strip("\"' ") == wanted or value.lower() == wanted:
        why, advice = "spaces, quotes and capital letters count", f"export {name}={wanted}"
    raise Wrong(f"{name} is {value!r}", why, advice)


def _is_as_good(name: str, value: str) -> bool:
    """Values that Slurm and NCCL take for the same."""
    if name != "NCCL_SOCKET_IFNAME":
        return name == "SBATCH_GPUS_PER_NODE" and value == "h100:4"
    # NCCL takes beginnings of names, with = whole names, and with ^ those that it shall not take.
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
        raise Wrong(f"`module {verb}` loads nothing", "module needs a verb", "module load NAME")
    for short, whole in MODULES.items():
        if not {short, whole} & set(loaded):
            near = [name for name in loaded if name.lower().startswith(short.lower())]
            why = f"{near[0]} is not in the list that SITE shows" if near else ""
            raise Wrong(f"{seen}; {whole} is missing", why, f"module load {' '.join(TO_LOAD)}")
    if strange := set(loaded) - set(MODULES) - set(MODULES.values()):
        raise Wrong(f"{seen}; there is no {min(strange)}", "", "see `module avail` in SITE")


TO_LOAD = tuple(MODULES.values())


site_file = Spec(
    todo="0.6",
    truth=planning.site_file,
    cases=lambda: [()],
    observe=site_seen,
    tell=lambda case: "site_file()",
    hints=SITE_HINTS,
    reasons={
        "invalid syntax": ("Shell lines are no Python.", "Put them in quotes and return the text.")
    },
    mistakes=mistakes(
        r"""
        HEAD_SUFFIX=-ib => HEAD_SUFFIX=ib
            The suffix lacks its hyphen.
        SBATCH_GPUS_PER_NODE=4 => SBATCH_GPUS_PER_NODE=8
            That is not the number of GPUs of one node.
        export SBATCH_PARTITION=gpu => SBATCH_PARTITION=gpu
            Without `export` the variable is not seen by sbatch.
        """,
        {},
    ),
)
