"""A hub for the course on one machine, whose users are the machine's own: see README.md beside it.

    jupyterhub -f <course>/sbatch/hub/jupyterhub_config.py     as root, in a folder of the hub's own

LocalProcessSpawner, JupyterHub's default, starts a student's server as that user and needs nothing
else. It sets no limits; with systemd, SystemdSpawner sets memory and cores, and is otherwise alike.
"""

import os
import sys
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
PROXY = COURSE / ".venv/hub/node_modules/.bin/configurable-http-proxy"

c = get_config()  # noqa: F821, JupyterHub defines it

if "HUB_URL" in os.environ:
    c.JupyterHub.bind_url = os.environ["HUB_URL"]
else:
    c.JupyterHub.ip = "127.0.0.1"  # this machine alone reaches it; a web server passes requests on
if PROXY.exists():
    c.ConfigurableHTTPProxy.command = [str(PROXY)]

# Who may log in: with the machine's passwords, the members of this group of the machine.
c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.allowed_groups = {os.environ.get("HUB_GROUP", "students")}
c.PAMAuthenticator.open_sessions = False

# The course's own environment serves the notebooks, so that the kernel `python3` is the course's.
c.Spawner.cmd = [str(COURSE / "sbatch/hub/start-server")]
# A kernel listens at ports of the machine, and would tell whoever connects what it prints.
c.Spawner.args = ["--KernelManager.transport_encryption=auto"]
c.Spawner.default_url = "/lab/tree/manyhands/start.ipynb"
c.Spawner.start_timeout = 300  # seconds; a machine on which a whole class begins is busy
c.Spawner.http_timeout = 300

# Many kernels share the cores, and PyTorch's threads spin while they wait for each other, which
# takes the cores from others: beside three busy processes a notebook of lesson 06 took 165 s so,
# and 50 s with threads that sleep. Alone it takes 40 s in both ways.
c.Spawner.environment = {"OMP_WAIT_POLICY": "PASSIVE"}

# A server without activity for two hours is ended. A job that a notebook watches is activity, for
# the notebook shows it anew each second; servers report theirs every five minutes, so that a limit
# of a few minutes would end people at work.
c.JupyterHub.load_roles = [
    {
        "name": "culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["culler"],
    }
]
c.JupyterHub.services = [
    {
        "name": "culler",
        "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=7200"],
    }
]
