"""Start a script's ranks on this node: torchrun with the course's rendezvous and a tidy end.

    python scripts/launch.py scripts/train_ddp.py --steps 50     all ranks on this machine
    srun ... python scripts/launch.py scripts/train_ddp.py       a node's agent: sbatch/launch.sh

In a pod of Kubernetes the first form is enough: what the pod is given says which node it is.

RANKS sets the number of ranks a node; otherwise it is one a GPU that torch sees, or 2 where it sees
none, or 1 where only one core was granted. Without Slurm a job takes all GPUs that it sees. Where
people share a machine, MANYHANDS_GPUS=2 has it take two, those in whose memory least is when it
starts, and CUDA_VISIBLE_DEVICES says among which.
Exit codes are the script's: 0 for a finished run; 1; 2 for bad input; 75 after a stop by SIGTERM or
SIGUSR1, which saves: the run is not finished yet. In a Slurm job it is launch.sh that says so.
After SIGHUP, which a terminal sends when it is closed, the run saves and the code is 129; under
nohup a job lives on. After SIGINT (Ctrl-C) the ranks end without saving, and the code is 130.
"""

import logging
import os
import signal
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from manyhands.instruments.gpus import Gpus
from manyhands.instruments.meters import machine
from manyhands.ranks import private, streams
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import (
    END_WITH_PARENT,
    FINISHED,
    HUNG_UP,
    UNFINISHED,
    end_with_caller,
    first_line,
    rendezvous_arguments,
)

STOPS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
SHARE = "MANYHANDS_GPUS"
INTERRUPTED = 128 + signal.SIGINT
TOLD = {2, UNFINISHED, HUNG_UP, INTERRUPTED}  # ranks that end so have said why in one line
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


def torchrun_arguments(environ: Mapping[str, str], num_gpus: int, num_cores: int = 2) -> list[str]:
    """The arguments for this node's agent, from what launch.sh and Slurm or a pod have set."""
    environ = {**environ, **node_of_pod(environ)}
    ranks = environ.get("RANKS", str(num_gpus or min(2, num_cores)))
    if not ranks.isdigit() or int(ranks) < 1:
        raise BadInput(f"RANKS is {ranks!r}: give the number of ranks a node, 1 or more")
    num_nodes = int(environ.get("NODES", 1))
    if num_nodes == 1:
        return ["--nnodes=1", f"--nproc-per-node={ranks}"]
    return rendezvous_arguments(
        num_nodes=num_nodes,
        processes_per_node=int(ranks),
        head_node=environ["HEAD_NODE"],
        job_id=int(environ["SLURM_JOB_ID"]),
        is_head=environ.get("SLURM_NODEID", "0") == "0",
    )


def room_arguments(room: Path, one_node: bool) -> list[str]:
    """The arguments that keep what the agent writes in the job's room; on one node also its store.

    With --standalone the agent would open a port that all users can join, and read a pickle there.
    """
    logs = [f"--log-dir={room / 'logs'}"]
    if not one_node:
        return logs
    meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    return [*meeting, f"--rdzv-endpoint={room / 'agents'}", f"--rdzv-id={room.name}", *logs]


def node_of_pod(environ: Mapping[str, str]) -> dict[str, str]:
    """What launch.sh and Slurm would have set, from what this pod of Kubernetes was given.

    Its number is JOB_COMPLETION_INDEX in an indexed Job (and in a TrainJob, which is made of one),
    and PET_NODE_RANK in a PyTorchJob. job.yaml says how many pods there are and which is the head
    in NODES and MASTER_ADDR; Kubeflow says so in PET_NNODES, and in PET_MASTER_ADDR (TrainJob) or
    MASTER_ADDR (PyTorchJob). Sources: kubernetes.io/docs/tasks/job; in kubeflow's repositories
    trainer pkg/runtime/framework/plugins/torch/torch.go and, for PyTorchJob, training-operator
    pkg/controller.v1/pytorch/envvar.go.
    """
    index = environ.get("JOB_COMPLETION_INDEX", environ.get("PET_NODE_RANK"))
    nodes = environ.get("PET_NNODES", environ.get("NODES", "1"))
    head = environ.get("PET_MASTER_ADDR", environ.get("MASTER_ADDR"))
    if index is None:
        return {}
    ranks = environ.get("RANKS", environ.get("PET_NPROC_PER_NODE", ""))
    given = {"RANKS": ranks} if ranks.isdigit() else {}
    if nodes == "1":
        return given
    if not nodes.isdigit() or not head:
        raise BadInput(
            f"this pod is told of {nodes!r} nodes with the head {head!r}: give a whole number as "
            "NODES, and the name of pod 0 in the headless service as MASTER_ADDR"
        )
    # All pods of a job know the same name of its head, and no other job has that name.
    number = str(zlib.crc32(head.encode()))
    return given | {
        "NODES": nodes,
        "HEAD_NODE": head,
        "SLURM_JOB_ID": number,
        "SLURM_NODEID": index,
    }


def in_pod(environ: Mapping[str, str]) -> bool:
    """Is this a pod of Kubernetes that has a number?"""
    return bool({"JOB_COMPLETION_INDEX", "PET_NODE_RANK"} & set(environ))


def pass_on_to_ranks(number: int, _: object) -> None:
    """Have this pod's ranks save and end, and with them all others: so the agents end together.

    Under Slurm all nodes are told to end. Kubernetes tells one pod, and if its agent ended by
    itself, those of the other pods would wait five minutes for it.
    """
    ranks = psutil.Process().children()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            rank.send_signal(number)
    if not ranks:
        os._exit(UNFINISHED)


def take_share(environ: MutableMapping[str, str]) -> None:
    """Leave GPUs to others where MANYHANDS_GPUS says how many a job may take."""
    share = environ.get(SHARE)
    if share is None or "MANYHANDS_BATCH" in environ:
        return  # Slurm has granted some
    if not share.isdigit():
        raise BadInput(f"{SHARE} is {share!r}: give the number of GPUs that a job may take")
    gpus = Gpus(max(1, int(share)))
    if gpus.names and len(gpus.names) > int(share):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.share(int(share)))
        environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML counts so


def prepare_environment(num_threads: int, one_node: bool, room: Path) -> None:
    """Set what the ranks inherit: threads, where they meet, and folders for caches."""
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    os.environ[private.ROOM] = str(room)
    os.environ.pop(private.STORE, None)
    if one_node:
        os.environ[private.STORE] = str(room / "store")
        # The agent's own store would be a port; this variable is torch's, and keeps it closed.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The interface between the nodes, as site.env names it, may not be there on a login node.
        os.environ["GLOO_SOCKET_IFNAME"] = private.LOOPBACK
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
    if "MANYHANDS_BATCH" in os.environ:
        # A node's own disk: home folders on a cluster are slow, and shared by all nodes.
        for name in CACHES:
            os.environ.setdefault(name, str(room / name.lower()))


def launch(command: list[str]) -> int:
    """Run `command` (a script and its flags) on this node's ranks and return the exit code."""
    if not command or not os.path.isfile(command[0]):
        raise BadInput(f"no script {' '.join(command[:1])}: give one, as scripts/train_ddp.py")
    take_share(os.environ)
    granted = machine(torch.device("cpu"))
    num_gpus = torch.cuda.device_count()
    arguments = torchrun_arguments(os.environ, num_gpus, granted["num_cores"])
    ranks = int(arguments[1].split("=")[1])
    one_node = arguments[0] == "--nnodes=1"
    with private.made_room() as room:
        prepare_environment(max(1, granted["num_cores"] // ranks), one_node, room)
        if granted["num_gpus"] and not num_gpus and os.environ.get("SLURM_NODEID", "0") == "0":
            print(
                f"launch.py: {granted['num_gpus']} GPU(s) were granted on {granted['host']}, but "
                f"torch {torch.__version__} sees none: the ranks use the CPU. Is this torch made "
                "for CUDA?",
                flush=True,
            )
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)  # its news are told below
        end_with_caller(room)
        os.environ[END_WITH_PARENT] = str(os.getpid())
        return run_agent([*arguments, *room_arguments(room, one_node)], command)


def run_agent(arguments: list[str], command: list[str]) -> int:
    """Be torchrun's agent until the ranks have ended, and return the exit code."""
    # An agent without this option passes on all of them but SIGUSR1.
    knows = "--signals-to-handle" in torchrun.get_args_parser().format_help()
    # Under nohup SIGHUP is ignored, and a handler of the agent's would change that.
    handled = [
        name for name in STOPS if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN
    ]
    if in_pod(os.environ):
        handled = [name for name in handled if name != "SIGTERM"]
        signal.signal(signal.SIGTERM, pass_on_to_ranks)
    if knows:
        arguments = [*arguments, f"--signals-to-handle={','.join(handled)}"]
    try:
        torchrun.main([*arguments, *command])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if codes & TOLD:
            return max(codes & TOLD)
        if in_pod(os.environ) and codes == {-signal.SIGTERM}:
            return UNFINISHED  # told to end before it had begun to train
        print(error, file=sys.stderr)
        return 1
    except SignalException as stop:
        if stop.sigval in (signal.SIGINT, signal.SIGHUP):
            how = "interrupted (SIGINT)"
            if stop.sigval == signal.SIGHUP:
                how = "the terminal was closed (SIGHUP; nohup keeps a job)"
            again = (
                "the same command with --out FOLDER goes on from its last checkpoint, if it has one"
            )
            print(f"launch.py: {how}: {again}", file=sys.stderr)
            return 128 + stop.sigval
        is_finished = (private.room() / FINISHED).exists()
        return 0 if is_finished else UNFINISHED
    except (RendezvousError, DistNetworkError, OSError) as error:
        raise BadInput(
            f"the nodes did not meet ({first_line(error)}): is the head node's name right, and its "
            f"port free? ({' '.join(arguments)})"
        ) from None
    finally:
        for name in handled:  # the agent's handlers would raise in the middle of tidying up
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    return 0


if __name__ == "__main__":
    streams.guard()
    try:
        code = launch(sys.argv[1:])
    except (BadInput, OSError) as problem:  # OSError: there is no place for temporary files
        print(f"launch.py: {problem}", file=sys.stderr)
        code = 2
    if code == UNFINISHED and "MANYHANDS_BATCH" in os.environ:
        code = 0  # srun would end other nodes, which may still write; launch.sh gives the job 75
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit takes a while, in which srun may end this process by a signal
