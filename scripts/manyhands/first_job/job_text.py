"""A job file with the faults that job files have, and the same file mended."""

BROKEN = """\
#!/bin/bash
#SBATCH --job-name=hello
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=1
#SBATCH --mem=64
#SBATCH --time=01:30
#SBATCH --output=logs/%x-%j.out

echo "job $SLURM_JOB_ID runs on $SLURM_JOB_NODELIST"
#SBATCH --error=%x-%j.err

torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=1 \\
    --rdzv-endpoint=g07:29500 train.py
"""


def mended_job() -> str:
    """Return the text of the job file BROKEN, mended. Triple quotes hold several lines.

    The job runs train.py in 8 processes: one for each GPU of 2 nodes with 4 GPUs. It gets 64 GB of
    memory per node and 90 minutes at most. What it prints goes to the file hello-<job number>.out,
    and its errors go to hello-<job number>.err, beside it.

    On each node it starts torchrun once, and torchrun starts the processes. All processes meet at
    the first node of the job, whichever nodes Slurm chooses, and two such jobs can run on the same
    nodes at the same time.
    """
    return """#!/bin/bash
#SBATCH --job-name=hello
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --time=01:30:00
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err

echo "job $SLURM_JOB_ID runs on $SLURM_JOB_NODELIST"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
srun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID \\
    --rdzv-endpoint=$head:$port train.py
"""
