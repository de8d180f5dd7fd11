"""A JupyterHub for users of this machine, without any change to the machine.

The users, their homes, the ports and all processes are in namespaces of their own, which end with
the program that made them, and the course is mounted read-only there, as an administrator would
install it. This needs root, and so does a hub that starts servers as other users.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stranger import loopback_up

ROOT = Path(__file__).resolve().parents[1]
HUB = ROOT / "sbatch/hub"
START_S = 120
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
PROXY = ROOT / ".venv/hub/node_modules/.bin/configurable-http-proxy"
NEEDED = {
    "/usr/bin/chromium": "apt install chromium",
    "/usr/bin/node": "apt install nodejs",
    str(PROXY): "make hub installs it",
}


def why_not(without_hub: bool = False) -> str:
    """What keeps a hub, or the scene without one, from running here; "" where nothing does."""
    if os.getuid() != 0:
        return "only root can start a hub for other users"
    missing = [
        f"{path} is missing ({how})"
        for path, how in NEEDED.items()
        if not (without_hub or os.path.exists(path))
    ]
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    if tried.returncode:
        missing.append(f"this machine allows no namespaces ({tried.stderr.strip()})")
    return "; ".join(missing)


# ---- the scene ---------------------------------------------------------------------------------


def run(*command: object, **how: object) -> str:
    """Run a command; its standard output."""
    words = list(map(str, command))
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, **how).stdout


def opened(path: Path, aside: Path) -> None:
    """Let other users through to `path`, without a change to the folders above it.

    The highest folder above it that is closed to others is covered by an empty one, in which the
    path is mounted again.
    """
    closed = next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None)
    if closed is not None:
        cover(closed, "755", [path], aside)


def cover(folder: Path, mode: str, paths: list[Path], aside: Path) -> None:
    """An empty folder in the place of this one, with those of these paths that lie in it."""
    paths = [path for path in paths if path.is_relative_to(folder)]
    kept = [Path(tempfile.mkdtemp(dir=aside)) for _ in paths]
    for path, place in zip(paths, kept, strict=True):
        run("mount", "--rbind", path, place)
    run("mount", "-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", folder)
    for path, place in zip(paths, kept, strict=True):
        path.mkdir(parents=True)
        run("mount", "--move", place, path)


def set_scene(students: list[str], seen: Path) -> tuple[Path, Path]:
    """Users, homes, an empty /tmp and a read-only course, in this process's namespaces.

    Returns:
        A folder for the hub, and the folder `seen`, of the course, where it can be written.
    """
    loopback_up()
    run("mount", "--make-rprivate", "/")
    aside = Path("/mnt")
    run("mount", "-t", "tmpfs", "-o", "mode=711", "tmpfs", aside)
    os.environ.pop("TMPDIR", None)
    tempfile.tempdir = None
    for name in ("upper", "work", "hub", "seen"):
        (aside / name).mkdir(mode=0o755)
    run("mount", "--bind", seen, aside / "seen")
    layers = f"lowerdir=/etc,upperdir={aside}/upper,workdir={aside}/work"
    run("mount", "-t", "overlay", "overlay", "-o", layers, "/etc")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/home")
    opened(Path(sys.base_prefix), aside)
    opened(ROOT, aside)
    cover(Path("/tmp"), "1777", [Path(sys.base_prefix), ROOT], aside)
    run("mount", "--bind", ROOT, ROOT)
    run("mount", "-o", "remount,ro,bind", ROOT)
    run("groupadd", "students")
    for name in students:
        run("useradd", "--create-home", "--gid", "students", "--shell", "/bin/bash", name)
        run("chpasswd", input=f"{name}:{password(name)}")
        (Path("/home") / name).chmod(0o700)
        show_all_cells(Path("/home") / name, name)
    return aside / "hub", aside / "seen"


def password(name: str) -> str:
    """A student's, in this namespace."""
    return f"{name}-secret"


def show_all_cells(home: Path, name: str) -> None:
    """Have JupyterLab draw also the cells that are out of sight, for a program to find them."""
    folder = home / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    folder.mkdir(parents=True)
    (folder / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))
    run("chown", "-R", f"{name}:students", home / ".jupyter")


@contextmanager
def hub(folder: Path, log: Path) -> Iterator[str]:
    """JupyterHub as the page for administrators has it; its address, once it answers there."""
    folder.chmod(0o700)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = "http://{}:{}".format(*one.getsockname())
    command = [Path(sys.prefix) / "bin/jupyterhub", "-f", HUB / "jupyterhub_config.py"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["HUB_URL"] = url
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file)
    try:
        end_s = time.monotonic() + START_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the hub did not start: {log} ends with\n{tail(log)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()


def answers(url: str) -> bool:
    """Does the hub's login page come?"""
    try:
        with urllib.request.urlopen(f"{url}/hub/login", timeout=5) as page:
            return page.status == 200
    except OSError:
        return False


def tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])
