"""What only a site knows: what its commands show, and the file that says so to every job."""

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

$ srun --partition=gpu getent hosts $(hostname)-ib   the node's name on the InfiniBand network
10.2.0.14   g14-ib
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
