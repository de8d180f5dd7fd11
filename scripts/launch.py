"""Start a script's ranks on this node: torchrun with the course's rendezvous and a tidy end.

    python scripts/launch.py scripts/train_ddp.py --steps 50     all ranks on this machine
    srun ... python scripts/launch.py scripts/train_ddp.py       a node's agent: sbatch/launch.sh

RANKS sets the number of ranks a node; otherwise it is one a GPU that torch sees, or 2 where it sees
none, or 1 where only one core was granted.
Exit codes are the script's: 0, also after a stop by SIGTERM or SIGUSR1; 1; 2 for bad input.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from manyhands.instruments.meters import machine
from manyhands.ranks.runtime import BadInput, end_with_caller, first_line, rendezvous_arguments

STOPS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


def torchrun_arguments(environ: Mapping[str, str], num_gpus: int, num_cores: int = 2) -> list[str]:
    """The arguments for this node's agent, from what launch.sh and Slurm have set."""
    ranks = environ.get("RANKS", str(num_gpus or min(2, num_cores)))
    if not ranks.isdigit() or int(ranks) < 1:
        raise BadInput(f"RANKS is {ranks!r}: give the number of ranks a node, 1 or more")
    num_nodes = int(environ.get("NODES", 1))
    if num_nodes == 1:
        return ["--standalone", f"--nproc-per-node={ranks}"]
    return rendezvous_arguments(
        num_nodes=num_nodes,
        processes_per_node=int(ranks),
        head_node=environ["HEAD_NODE"],
        job_id=int(environ["SLURM_JOB_ID"]),
        is_head=environ.get("SLURM_NODEID", "0") == "0",
    )


def prepare_environment(num_threads: int, one_node: bool) -> None:
    """Set what the ranks inherit: threads, the network's interface, and folders for caches."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    if one_node:
        # The interface between the nodes, as site.env names it, may not be there on a login node.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
    if "MANYHANDS_BATCH" in os.environ:
        # A node's own disk: home folders on a cluster are slow, and shared by all nodes.
        folder = Path(tempfile.gettempdir()) / f"manyhands-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="manyhands-"))  # code from the cache will be run
        for name in CACHES:
            os.environ.setdefault(name, str(folder / name.lower()))


def launch(command: list[str]) -> int:
    """Run `command` (a script and its flags) on this node's ranks and return the exit code."""
    if not command or not os.path.isfile(command[0]):
        raise BadInput(f"no script {' '.join(command[:1])}: give one, as scripts/train_ddp.py")
    granted = machine(torch.device("cpu"))
    num_gpus = torch.cuda.device_count()
    arguments = torchrun_arguments(os.environ, num_gpus, granted["num_cores"])
    ranks = int(arguments[1].split("=")[1])
    prepare_environment(max(1, granted["num_cores"] // ranks), "--standalone" in arguments)
    if granted["num_gpus"] and not num_gpus and os.environ.get("SLURM_NODEID", "0") == "0":
        print(
            f"launch.py: {granted['num_gpus']} GPU(s) were granted on {granted['host']}, but torch "
            f"{torch.__version__} sees none: the ranks use the CPU. Is this torch made for CUDA?",
            flush=True,
        )
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its news are told below
    end_with_caller()
    # An agent without this option passes on all of them but SIGUSR1.
    knows = "--signals-to-handle" in torchrun.get_args_parser().format_help()
    stops = [f"--signals-to-handle={','.join(STOPS)}"] if knows else []
    try:
        torchrun.main([*arguments, *stops, *command])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes & {2, 130}:
            return max(codes & {2, 130})  # the script has said in one line what is wrong
        print(error, file=sys.stderr)
        return 1
    except SignalException as stop:
        return 130 if stop.sigval == signal.SIGINT else 0
    except (RendezvousError, DistNetworkError, OSError) as error:
        raise BadInput(
            f"the nodes did not meet ({first_line(error)}): is the head node's name right, and its "
            f"port free? ({' '.join(arguments)})"
        ) from None
    return 0


if __name__ == "__main__":
    try:
        code = launch(sys.argv[1:])
    except BadInput as problem:
        print(f"launch.py: {problem}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit takes a while, in which srun may end this process by a signal
