"""A rehearsal of a job file: bash runs it, and stand-ins for Slurm's programs say what was started.

    job file --> bash --> srun (stand-in) --> torchrun (stand-in), once for each task of each node
                                                '--> a line in a list; nothing is trained

`run_here` leaves torchrun as it is, and takes this machine for every node. In both the #SBATCH
lines are comments to bash: what is granted is said by the caller, as Slurm says it.
Source: https://slurm.schedmd.com/srun.html and the variables in https://slurm.schedmd.com/sbatch.html
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 10.0  # for the script of a job, which only starts stand-ins
RECORDED = ("torchrun", "python", "python3")

# Options of srun that may be followed by a value after a space.
SRUN = r"""#!/bin/bash
nodes=$SLURM_NNODES per_node=$SLURM_NTASKS_PER_NODE tasks=''
while [[ $1 == -* ]]; do
    case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks=*) tasks=${1#*=} ;;
    --ntasks-per-node=*) per_node=${1#*=} ;;
    --nodes | -N) nodes=$2; shift ;;
    --ntasks | -n) tasks=$2; shift ;;
    --ntasks-per-node) per_node=$2; shift ;;
    -N*) nodes=${1#-N} ;;
    -n*) tasks=${1#-n} ;;
    --cpus-per-task | -c | --output | -o | --error | -e | --export | --mem) shift ;;
    --gpus-per-node | --gpus-per-task | --gpu-bind | --cpu-bind | --nodelist | -w) shift ;;
    esac
    shift
done
[[ -z $tasks ]] || per_node=$(((tasks + nodes - 1) / nodes))
procid=0
nodeid=0
for host in $MADE_UP_NODES; do
    [[ $nodeid -lt $nodes ]] || break
    for ((local = 0; local < per_node; local++)); do
        export SLURM_NODEID=$nodeid SLURM_PROCID=$procid SLURM_LOCALID=$local
        export SLURMD_NODENAME=$host SLURM_NTASKS=$((nodes * per_node))
        if [[ $AT_ONCE ]]; then "$@" & else "$@" || exit; fi
        procid=$((procid + 1))
    done
    nodeid=$((nodeid + 1))
done
wait
"""
RECORD = r"""#!/bin/bash
name=${0##*/}
if [[ $name != torchrun && $1 == -c ]]; then exec "$REAL_PYTHON" "$@"; fi
printf '%s\0' "$SLURMD_NODENAME" "$#" "$name" "$@" >>"$RECORDS"
"""
SCONTROL = r"""#!/bin/bash
[[ $1 == show && $2 == host* ]] && printf '%s\n' $MADE_UP_NODES
"""
HOSTNAME = '#!/bin/bash\necho "$SLURMD_NODENAME"\n'
SLURM = {"srun": SRUN, "scontrol": SCONTROL, "hostname": HOSTNAME, "module": "#!/bin/bash\n"}


class Start(NamedTuple):
    """A program that the job starts: on which node, and the words of its command."""

    node: str
    words: list[str]


class Rehearsal(NamedTuple):
    """What a job file starts, and what bash and the programs say besides."""

    starts: list[Start]
    said: str
    ended: bool


def rehearse(
    text: str, nodes: Sequence[str], tasks_per_node: int = 1, job_id: int = 4711
) -> Rehearsal:
    """Run the text of a job file with stand-ins in place of srun, torchrun and python.

    Args:
        nodes: names of the nodes that the job was granted, the first one first.
        tasks_per_node: what it asked for with --ntasks-per-node.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, text, SLURM | dict.fromkeys(RECORDED, RECORD))
        environ = _environment(folder, nodes, tasks_per_node, job_id)
        said = _run(folder, environ, LIMIT_S)
        records = folder / "records"
        starts = _read(records.read_bytes().decode(errors="replace")) if records.exists() else []
    return Rehearsal(starts, said or "", ended=said is not None)


def run_here(text: str, program: str, num_nodes: int = 2, limit_s: float = 60.0) -> str:
    """Really run a job file on this machine, which stands in for each of its nodes.

    Args:
        program: the text of the file train.py that torchrun starts.

    Returns:
        What it prints.

    Raises:
        TimeoutError: it has not ended within the limit; nothing of it is left running.
    """
    nodes = ["localhost"] * num_nodes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, text, SLURM)
        (folder / "train.py").write_text(program)
        environ = dict(_environment(folder, nodes, 1, os.getpid()))
        own = Path(sys.executable).parent  # torchrun lies beside python
        environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{own}{os.pathsep}{os.defpath}"
        environ |= {"AT_ONCE": "1", "OMP_NUM_THREADS": "1"}
        said = _run(folder, environ, limit_s)
    if said is None:
        raise TimeoutError(f"the job had not ended after {limit_s:g} s: do all torchruns meet?")
    return said


def hostlist(nodes: Sequence[str]) -> str:
    """Names of nodes as Slurm writes them: k12 and k31 are k[12,31]."""
    words = [re.fullmatch(r"(.*?)(\d*)", name).groups() for name in nodes]
    letters = {letter for letter, _ in words}
    if len(nodes) == 1 or len(letters) > 1:
        return ",".join(nodes)
    return f"{letters.pop()}[{','.join(number for _, number in words)}]"


def _write(folder: Path, text: str, programs: Mapping[str, str]) -> None:
    """The job file and the stand-ins; and an environment of Python that changes nothing."""
    (folder / "job.sbatch").write_text(text)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    (folder / "bin").mkdir()
    for name, script in programs.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)


def _run(folder: Path, environ: Mapping[str, str], limit_s: float) -> str | None:
    """What the job file prints; None where it was ended at the limit, with all that it started."""
    with subprocess.Popen(
        [shutil.which("bash") or "bash", "job.sbatch"],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that it can be ended as a whole
    ) as job:
        try:
            said, _ = job.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    return said.decode(errors="replace")


def _environment(
    folder: Path, nodes: Sequence[str], tasks_per_node: int, job_id: int
) -> Mapping[str, str]:
    """The variables that Slurm sets for the script of a batch job, which runs on the first node."""
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.defpath}",
        "HOME": str(folder),
        "USER": "student",
        "LC_ALL": "C",
        "RECORDS": str(folder / "records"),
        "REAL_PYTHON": shutil.which("python3") or "python3",
        "MADE_UP_NODES": " ".join(nodes),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": "hello",
        "SLURM_JOB_NODELIST": hostlist(nodes),
        "SLURM_NODELIST": hostlist(nodes),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NTASKS": str(len(nodes) * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_GPUS_PER_NODE": "4",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURMD_NODENAME": nodes[0],
        "TMPDIR": str(folder),
    }


def _read(records: str) -> list[Start]:
    """The starts in a list of node, number of words, words."""
    words = records.split("\0")[:-1]
    starts = []
    while words:
        node, number = words[0], int(words[1])
        starts.append(Start(node, words[2 : 3 + number]))
        words = words[3 + number :]
    return starts
