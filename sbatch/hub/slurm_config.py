"""The same hub where servers are jobs of Slurm, by batchspawner: see README.md beside it.

    jupyterhub -f <course>/sbatch/hub/slurm_config.py     as root on a login node

A student's server, with its kernels and their checks, is a job on a compute node. What a notebook
starts with watch.run is a job of its own, which asks for what it needs and ends by itself.
"""

import os
from pathlib import Path

import batchspawner  # noqa: F401 (servers tell the hub their ports by its page)

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parents[1] / ".venv/bin"

c = get_config()  # noqa: F821, JupyterHub defines it
load_subconfig(str(HERE / "jupyterhub_config.py"))  # noqa: F821

c.JupyterHub.spawner_class = "batchspawner.SlurmSpawner"
c.JupyterHub.hub_ip = "0.0.0.0"  # servers on other nodes speak with it, each with its token
c.BatchSpawnerBase.exec_prefix = "runuser -u {username} --"  # who submits, asks and cancels
c.BatchSpawnerBase.batchspawner_singleuser_cmd = (
    f"{HERE / 'start-server'} {PROGRAMS / 'batchspawner-singleuser'}"
)
c.Spawner.cmd = [str(PROGRAMS / "jupyterhub-singleuser")]
c.Spawner.start_timeout = 600  # seconds; the job may have to wait

# What a notebook needs: two cores, and memory for a kernel and a check on five ranks.
c.BatchSpawnerBase.req_nprocs = "2"
c.BatchSpawnerBase.req_memory = "4G"
c.BatchSpawnerBase.req_runtime = "8:00:00"
c.BatchSpawnerBase.req_partition = os.environ.get("HUB_PARTITION", "")
c.Spawner.env_keep = ["PATH", "LANG", "LC_ALL", "SLURM_CONF"]
c.SlurmSpawner.batch_script = """#!/bin/bash
#SBATCH --job-name=notebook
#SBATCH --output={{homedir}}/.notebook.log
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={{nprocs}}
#SBATCH --mem={{memory}}
#SBATCH --time={{runtime}}
{% if partition %}#SBATCH --partition={{partition}}
{% endif %}
exec {{cmd}}
"""
