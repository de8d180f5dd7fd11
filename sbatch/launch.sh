#!/bin/bash
# Start a script's ranks on all nodes of this Slurm job, or on this machine where there is no Slurm.
#
#   bash sbatch/launch.sh scripts/train_ddp.py --steps 100
#
# RANKS is the number of ranks a node (default: one a GPU, else 2).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
if [ -f "$here/site.env" ]; then
    # shellcheck source=/dev/null
    . "$here/site.env"
fi
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
if [ -f "$root/$1" ]; then
    set -- "$root/$1" "${@:2}"
fi

if [ "${SLURM_NNODES:-1}" -gt 1 ]; then
    NODES=$SLURM_NNODES
    HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)${HEAD_SUFFIX:-}
    export NODES HEAD_NODE
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
    exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 "$python" "$root/scripts/launch.py" "$@"
fi
exec "$python" "$root/scripts/launch.py" "$@"
