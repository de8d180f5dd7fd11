"""What scripts/hub.py makes for the hubs of others: a kernel that Jupyter finds, and links."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import nbformat
import pytest
import yaml
import zmq
from jupyter_client import KernelManager

ROOT = Path(__file__).resolve().parents[2]


def hub(*words: str, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "scripts/hub.py", *words],
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )


def found(**environ: str) -> dict:
    """The kernel that another Jupyter starts for a notebook of the course."""
    notebook = nbformat.read(ROOT / "notebooks/start.ipynb", as_version=4)
    listed = subprocess.run(
        [sys.executable, "-m", "jupyter", "kernelspec", "list", "--json"],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(listed.stdout)["kernelspecs"][notebook.metadata.kernelspec.name]["spec"]


def test_kernel_is_the_one_that_notebooks_get(tmp_path):
    """For oneself, and for all by the line that the command prints."""
    yours = {"JUPYTER_DATA_DIR": str(tmp_path / "yours"), "JUPYTER_PREFER_ENV_PATH": "0"}
    assert found(**yours)["display_name"] != "Many Hands"
    assert hub("kernel", **yours).returncode == 0
    said = hub("kernel", "--prefix", str(tmp_path / "all")).stdout
    path = said.partition('["JUPYTER_PATH"] = ')[2].split("'")[1]
    for spec in (found(**yours), found(JUPYTER_PATH=path)):
        assert (spec["display_name"], spec["argv"][0]) == ("Many Hands", sys.executable)
        assert spec["env"] == {"OMP_WAIT_POLICY": "PASSIVE"}


def test_kernel_that_cannot_be_written_is_one_line():
    done = hub("kernel", "--prefix", "/proc/none")
    assert done.returncode == 2 and done.stderr.startswith("hub.py: cannot write /proc/none")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["manyhands", "many hands & 100% #1"])
def test_link_gives_nbgitpuller_what_was_meant(name):
    """Its values come whole out of the address, and the page's address is one of its own."""
    repository = f"https://git.example.edu/you/{name}.git"
    words = ("--branch", "class/2026", "--notebook", "06_ddp")
    done = hub("link", "https://hub.example.edu/", repository, *words)
    address = urlsplit(done.stdout.strip())
    asked = {key: value for key, (value,) in parse_qs(address.query).items()}
    assert address.path == "/hub/user-redirect/git-pull" and not address.fragment
    asked.pop("urlpath")
    assert asked == {"repo": repository, "branch": "class/2026", "targetpath": name}
    page = urlsplit(parse_qs(address.query)["urlpath"][0])
    assert unquote(page.path) == f"lab/tree/{name}/notebooks/06_ddp.ipynb"
    assert not page.query and not page.fragment


def test_hub_without_an_address_is_one_line():
    done = hub("link", "hub.example.edu", "https://git.example.edu/you/manyhands")
    assert done.returncode == 2 and "hub.example.edu is no address of a hub" in done.stderr


def test_values_for_kubernetes_fit_the_image_and_the_other_hub():
    values = yaml.safe_load((ROOT / "sbatch/hub/values.yaml").read_text())
    image = (ROOT / "sbatch/containers/Dockerfile").read_text()
    (course,), (user,) = re.findall(r"WORKDIR (\S+)", image), re.findall(r"USER (\S+)", image)
    (command,) = values["singleuser"]["cmd"]
    assert command.startswith(f"{course}/")
    assert os.access(ROOT / command.removeprefix(f"{course}/"), os.X_OK)
    assert values["singleuser"]["storage"]["homeMountPath"] == str(Path("/", "home", user))
    config = (ROOT / "sbatch/hub/jupyterhub_config.py").read_text()
    assert f'default_url = "{values["singleuser"]["defaultUrl"]}"' in config


def overheard(encryption: str) -> bool:
    """Does whoever connects to a kernel's port hear what the kernel prints?"""
    manager = KernelManager(transport_encryption=encryption)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    ear = zmq.Context.instance().socket(zmq.SUB)
    try:
        client.wait_for_ready(timeout=300)
        ear.subscribe(b"")
        ear.connect(f"tcp://127.0.0.1:{manager.iopub_port}")
        poller, end_s = zmq.Poller(), time.monotonic() + 300
        poller.register(ear)
        while time.monotonic() < end_s:
            client.execute_interactive("print('my answer')", timeout=300, output_hook=str)
            if poller.poll(500):
                return True
            if encryption != "disabled":
                return False
        return False
    finally:
        ear.close(0)
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_kernels_of_the_hub_tell_nobody_else_what_they_print():
    config = (ROOT / "sbatch/hub/jupyterhub_config.py").read_text()
    (encryption,) = re.findall(r"--KernelManager\.transport_encryption=(\w+)", config)
    assert overheard("disabled") and not overheard(encryption)
