"""For a JupyterHub of others: the course as its kernel, and links that bring the notebooks.

python scripts/hub.py kernel                        for yourself
python scripts/hub.py kernel --prefix /opt/course   for all, by a line in the hub's configuration
python scripts/hub.py link https://HUB https://HOST/YOU/manyhands.git
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode, urlsplit

from tyro.conf import OmitSubcommandPrefixes, Positional
from tyro.conf import subcommand as named

from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line

DISPLAY_NAME = "Many Hands"
# The notebooks ask for this name, which is that of each Jupyter's own Python. A notebook with
# another one would ask the reader for a kernel wherever the course is installed by itself.
NAME = "python3"


@dataclass(frozen=True)
class Kernel:
    """Write a kernel that runs this Python, under the name that the notebooks ask for."""

    prefix: str = ""
    """Folder to write it to, in share/jupyter/kernels; by default your own kernels' folder."""


@dataclass(frozen=True)
class Link:
    """Print a link that has nbgitpuller fetch the notebooks and open the start page."""

    hub: Positional[str]
    """Address of the hub, such as https://hub.example.edu."""
    repository: Positional[str]
    """Address from which git can clone the course."""
    branch: str = "main"
    """Branch of the repository."""
    notebook: str = "start"
    """Notebook to open, such as 06_ddp."""


@dataclass(frozen=True)
class Config:
    """What to make."""

    make: Annotated[Kernel, named("kernel")] | Annotated[Link, named("link")]


def write_kernel(prefix: str) -> Path:
    """Write the kernel; its folder. BadInput where that cannot be."""
    from ipykernel.kernelspec import install

    try:
        folder = install(
            user=not prefix,
            prefix=prefix or None,
            kernel_name=NAME,
            display_name=DISPLAY_NAME,
            env={"OMP_WAIT_POLICY": "PASSIVE"},  # many kernels share the cores
        )
    except OSError as problem:
        raise BadInput(f"cannot write {problem.filename}: {problem.strerror}") from None
    return Path(folder)


def link(hub: str, repository: str, branch: str, notebook: str) -> str:
    """The address; its parts may hold any characters. BadInput where the hub is no address."""
    if urlsplit(hub).scheme not in ("http", "https") or not urlsplit(hub).netloc:
        raise BadInput(f"{hub} is no address of a hub: it begins with https://")
    folder = repository.rstrip("/").rpartition("/")[2].removesuffix(".git")
    # Read twice: nbgitpuller takes the value from this link, and goes to it as an address.
    page = quote(f"lab/tree/{folder}/notebooks/{notebook}.ipynb")
    asked = {"repo": repository, "branch": branch, "targetpath": folder, "urlpath": page}
    return f"{hub.rstrip('/')}/hub/user-redirect/git-pull?{urlencode(asked, quote_via=quote)}"


def main(config: Config) -> None:
    """Make it, and say what is left to do."""
    if isinstance(config.make, Link):
        print(link(**vars(config.make)))
        return
    folder = write_kernel(config.make.prefix)
    print(f"{DISPLAY_NAME} runs {sys.executable}: {folder}/kernel.json")
    if config.make.prefix:
        path = str(folder.parents[1])
        print(f'For all: c.Spawner.environment["JUPYTER_PATH"] = {path!r} in jupyterhub_config.py')


if __name__ == "__main__":
    command_line(main, OmitSubcommandPrefixes[Config])
