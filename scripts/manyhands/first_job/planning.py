"""A first job: how long a training takes, who does what on which device, and what was used.

    rank            0      1      2      3       world size 4: processes in the job
    node            node1  node1  node2  node2
    local rank      0      1      0      1       place on its node
    device          cuda:0 cuda:1 cuda:0 cuda:1
    tasks 0..6      0, 4   1, 5   2, 6   3       each rank takes its share

Price: the map is one all-gather of about 100 bytes a rank; the shares cost no message at all.
Sources: https://docs.pytorch.org/docs/stable/elastic/run.html, https://slurm.schedmd.com/sbatch.html
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

SITE = """\
$ sinfo --format="%P %l %D %G"                      which queues there are
PARTITION   TIMELIMIT    NODES   GRES
cpu*        1-00:00:00   40      (null)
gpu         1-00:00:00   12      gpu:h100:4
gpu-test    0-00:30:00   1       gpu:h100:2

$ sacctmgr show associations user=$USER format=Account,Partition
Account     Partition
home        cpu
class       gpu

$ module --terse avail                               what can be loaded
CUDA/12.8
Python/3.12

$ srun --partition=gpu ip -brief address             the networks of a GPU node
lo          UNKNOWN      127.0.0.1/8
eth0        UP           10.1.0.14/16                Ethernet, 10 Gbit/s
ib0         UP           10.2.0.14/16                InfiniBand, 400 Gbit/s

$ srun --partition=gpu getent hosts $(hostname)-ib   the node's name in the InfiniBand
10.2.0.14   g14-ib
"""


class Place(NamedTuple):
    """Where one rank runs."""

    rank: int
    host: str
    local_rank: int
    device: str


def days_on_devices(
    petaflops_days: float, num_devices: int, peak_tflops: float, utilisation: float
) -> float:
    """How many days a training takes, not rounded.

    Args:
        petaflops_days: its work. One is the work of a machine that does 1e15 floating-point
            operations in each second of a whole day.
        peak_tflops: what the data sheet promises of one device, in 1e12 operations per second.
        utilisation: the share of that peak that the training reaches, from 0 to 1.
    """
    petaflops = num_devices * peak_tflops / 1000 * utilisation
    return petaflops_days / petaflops


def device_map(
    environ: Mapping[str, str], num_gpus: int, host: str, group: dist.ProcessGroup | None = None
) -> list[Place]:
    """Find out where every rank runs. Every rank gets the same list, in the order of the ranks.

    Args:
        environ: this process's RANK (in the whole job, also where the group is smaller),
            LOCAL_RANK and LOCAL_WORLD_SIZE (processes on this node), as text.
        num_gpus: GPUs of this node. A rank's device is "cuda:<local rank>" where the node has a
            GPU for each of its processes, else "cpu".
        host: the name of this node.
        group: the ranks that take part; None means all.

    `dist.all_gather_object(places, mine, group=group)` sends `mine` to all and fills the list
    `places`, which must have one element for each rank of the group.
    """
    local_rank = int(environ["LOCAL_RANK"])
    has_gpu = num_gpus >= int(environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local_rank}" if has_gpu else "cpu"
    mine = Place(int(environ["RANK"]), host, local_rank, device)
    places = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, mine, group=group)
    return places


def my_share(tasks: Sequence, rank: int, world_size: int) -> list:
    """The tasks of one rank: those at the positions rank, rank + world_size, rank + 2 world_size...

    A list; `tasks` stays as it is. So each task is done by one rank, and all have as much to do.
    """
    return list(tasks[rank::world_size])


def job_file(name: str, nodes: int, gpus_per_node: int, minutes: int, command: str) -> str:
    """Write a Slurm job file: the text from its first line, #!/bin/bash, to the command.

    It asks for `nodes` nodes with `gpus_per_node` GPUs each, for at most `minutes` minutes, and
    for one task a node: torchrun, which the command starts, starts the processes itself. The job
    is called `name`; what it prints goes to the file <name>-<job number>.out, %x-%j.out for Slurm.
    The last line is `command` as it is given. What only a site knows stands in the site file.
    """
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00
#SBATCH --output=%x-%j.out
{command}
"""


def site_file() -> str:
    """Write sbatch/site.env for the site that SITE shows: the text of a file for bash.

    Six lines: SBATCH_ACCOUNT, SBATCH_PARTITION (training runs, up to a day), SBATCH_GPUS_PER_NODE,
    NCCL_SOCKET_IFNAME (the fastest network between the nodes) and HEAD_SUFFIX (what is added to a
    node's name there), each with `export`; and one line that loads Python and CUDA. Nothing else:
    such a variable overrules every job file.
    """
    return """export SBATCH_ACCOUNT=class
export SBATCH_PARTITION=gpu
export SBATCH_GPUS_PER_NODE=4
export NCCL_SOCKET_IFNAME=ib0
export HEAD_SUFFIX=-ib
module load Python/3.12 CUDA/12.8
"""


def device_hours(
    busy: Sequence[Sequence[float]], num_granted: int, seconds: float
) -> tuple[float, float]:
    """The device-hours that a job is charged, and those of them in which a device worked.

    Args:
        busy: for each rank how busy its device was, from 0 to 1, sampled at equal distances; a
            rank may have no sample, and counts as idle. Each rank's mean is over its own samples.
        num_granted: devices that the job asked for and got, with a rank or without one.
        seconds: how long the job had them.
    """
    hours = seconds / 3600
    means = [sum(samples) / len(samples) if samples else 0.0 for samples in busy]
    return num_granted * hours, sum(means) * hours
