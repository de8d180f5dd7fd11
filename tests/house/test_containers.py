"""The course as an image: its steps are README's commands, and they make the course run.

The Dockerfile's steps are carried out in a bare Debian that `mmdebstrap` makes from Debian's own
packages, in namespaces that end with it: no Docker is needed. Where it lacks something, the test is
skipped and says what. PIP_... variables and pip's own settings hold inside, too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from units import Course

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "sbatch" / "containers"
LIMIT_S = 540  # of one step; installing PyTorch on a busy machine takes minutes
SYSTEM = re.compile(r"apt-get|rm -|useradd|install --directory|mkdir|chmod|cd ")


class Step(NamedTuple):
    """One instruction of a Dockerfile."""

    name: str
    text: str


def steps() -> list[Step]:
    """The Dockerfile's instructions, each on one line."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in lines if line.strip()]


def sections() -> dict[str, list[str]]:
    """The Apptainer definition: section -> its lines."""
    found: dict[str, list[str]] = {"header": []}
    name = "header"
    for line in (FOLDER / "manyhands.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            found[name] = []
        elif line.strip() and not line.startswith("#"):
            found[name].append(line.strip())
    return found


def commands(lines: list[str]) -> list[str]:
    """What is called, one command a line, without the value of TORCH_INDEX."""
    every = [part.strip() for line in lines for part in line.split("&&")]
    return [re.sub(r"TORCH_INDEX=.*", "TORCH_INDEX=ADDRESS", one) for one in every]


# ---- what stands in the files ----------------------------------------------------------------


def test_steps_of_both_are_readme_s_commands():
    """Beside the system's own commands there is `make install`, and then `make job`."""
    readme = (ROOT / "README.md").read_text()
    packages = re.search(r"apt install ([\w -]+)`", readme)[1]
    docker = commands([step.text for step in steps() if step.name == "RUN"])
    apptainer = commands(sections()["post"])
    for found in (docker, apptainer):
        assert f"apt-get install -y --no-install-recommends {packages}" in found
        ours = [one for one in found if not SYSTEM.match(one)]
        assert ours == ["make install TORCH_INDEX=ADDRESS"]
    assert "make install" in readme and "TORCH_INDEX=ADDRESS" in readme and "make job" in readme
    assert json.loads(next(step.text for step in steps() if step.name == "CMD")) == ["make", "job"]
    assert sections()["runscript"][-1] == "exec make job"
    assert f"From: {steps()[0].text}" in sections()["header"]


def test_nobody_is_root_and_nothing_is_secret():
    names = [step.name for step in steps()]
    user = next(step.text for step in steps() if step.name == "USER")
    assert user != "root" and names.index("USER") < names.index("COPY")
    assert names.count("USER") == 1 and "ENV" not in names
    assert [step.text for step in steps() if step.name == "ARG"] == ["TORCH_INDEX="]
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv*", "sbatch/site.env", "mine"} <= set(ignored)
    assert any(line.endswith("sbatch/site.env") for line in sections()["post"])


def test_the_definition_takes_what_the_course_needs():
    """All that `make install` and the jobs read; each is there, and goes to its own name."""
    pairs = [line.split() for line in sections()["files"]]
    assert all((ROOT / source).exists() for source, _ in pairs)
    assert all(target == f"/course/{source}" for source, target in pairs)
    needed = {"Makefile", "README.md", "pyproject.toml", "constraints.txt", "scripts", "sbatch"}
    assert needed <= {source for source, _ in pairs}


# ---- the steps, for real ---------------------------------------------------------------------

SPACES = ("--mount", "--pid", "--fork", "--mount-proc")
INSIDE = r"""
set -euo pipefail
root=$1 && shift
mount --make-rprivate /
for path in /dev /proc /etc/resolv.conf /etc/hosts "$@"; do
    [ -e "$path" ] || continue
    if [ -d "$path" ]; then mkdir -p "$root$path"; else
        mkdir -p "$root$(dirname "$path")"
        [ -e "$root$path" ] || : >"$root$path"
    fi
    mount --rbind "$path" "$root$path"
done
exec chroot "$root" /usr/bin/env -i bash -e /steps.sh
"""


def pip_settings() -> dict[str, str]:
    """This machine's settings of pip, as the variables that say the same."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}


def places(settings: dict[str, str]) -> Iterator[Path]:
    """Files and folders of this machine that pip's settings name: certificates, wheels."""
    for value in settings.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # An index of links, as .../simple, leads to files beside it.
                yield path.parent if word.startswith("file://") else path


def with_host_files(root: Path, settings: dict[str, str]) -> dict[str, str]:
    """The settings, with the files that they name copied to where no package of Debian writes."""
    (root / "host").mkdir()
    for number, path in enumerate(sorted({one for one in places(settings) if one.is_file()})):
        inside = f"/host/{number}-{path.name}"
        shutil.copy(path, f"{root}{inside}")
        settings = {name: value.replace(str(path), inside) for name, value in settings.items()}
    return settings


def whole_script(settings: dict[str, str]) -> str:
    """The Dockerfile's steps as one script of bash, and then a short job, as its user."""
    names = ("http_proxy", "https_proxy", "no_proxy")
    proxies = {name: os.environ[name] for name in names if name in os.environ}
    torch_index = os.environ.get("TORCH_INDEX", "")
    given = settings | proxies | {"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C.UTF-8"}
    given |= {"DEBIAN_FRONTEND": "noninteractive"}
    user, folder = "root", "/"
    lines = [f"export {name}={quoted(value)}" for name, value in given.items()]
    for step in steps():
        if step.name == "USER":
            user = step.text
        elif step.name == "WORKDIR":
            folder = step.text
        elif step.name == "COPY":
            lines.append(f"cp -a /context/. {folder} && chown -R {user}: {folder}")
        elif step.name == "RUN":
            text = step.text.replace("$TORCH_INDEX", torch_index)
            lines.append(as_user(user, folder, text))
    # CMD is `make job`; its recipe, as make itself says it, for a few steps.
    lines.append(as_user(user, folder, "$(make -sn job | tail -n 1 | tr -d '\"') --steps 4"))
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """One word of bash."""
    return "'" + text.replace("'", "'\\''") + "'"


def as_user(user: str, folder: str, text: str) -> str:
    """A line that runs `text` as this user, in this folder."""
    command = f"cd {folder} && echo == {quoted(text.split()[0])} $SECONDS && {text}"
    if user == "root":
        return f"bash -ec {quoted(command)}"
    return (
        f"HOME=$(getent passwd {user} | cut -d: -f6) setpriv --reuid {user} --regid {user} "
        f"--init-groups bash -ec {quoted(command)}"
    )


def lacking(tmp_path: Path) -> str:
    """Why the steps cannot be carried out here, or ""."""
    if os.getuid() != 0:
        return "only root may change into another system's files"
    if not shutil.which("mmdebstrap"):
        return "mmdebstrap is missing; on Debian and Ubuntu: apt install mmdebstrap"
    probe = subprocess.run(["unshare", *SPACES, "true"], capture_output=True)
    if probe.returncode:
        return f"no namespaces: {probe.stderr.decode().strip()}"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    command += ["--ignore-installed", "--constraint", ROOT / "constraints.txt", "tyro"]
    index = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return f"pip reaches no index: {index.stderr.strip()[-200:]}" if index.returncode else ""


@pytest.mark.nightly
def test_the_steps_make_the_course_run(tmp_path):
    """In a bare Debian: install as README says, and train a few steps as the image's user."""
    if reason := lacking(tmp_path):
        pytest.skip(reason)
    root, begin_s = tmp_path / "root", time.monotonic()
    suite = re.search(r"debian:(\w+)", steps()[0].text)[1]
    made = subprocess.run(
        ["mmdebstrap", "--variant=minbase", "--quiet", suite, root],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if made.returncode:
        pytest.skip(f"no Debian {suite} to be had: {made.stderr.strip()[-300:]}")
    try:
        for name in Course(ROOT).sums:
            target = root / "context" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        settings = with_host_files(root, pip_settings())
        (root / "steps.sh").write_text(whole_script(settings))
        spaces = ["unshare", *SPACES, "--kill-child", "bash", "-c", INSIDE]
        done = subprocess.run(
            [*spaces, "inside", root, *{one for one in places(settings) if one.is_dir()}],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        said = done.stdout + done.stderr
        print(f"{time.monotonic() - begin_s:.0f} s", *re.findall(r"^== .*", said, re.MULTILINE))
        assert done.returncode == 0, said[-6000:]
        runs = list((root / "course" / "runs").glob("*/status.json"))
        assert [json.loads(one.read_text())["state"] for one in runs] == ["finished"]
        assert runs[0].stat().st_uid == 1000 and "rank(s) on cpu" in said
    finally:
        shutil.rmtree(root, ignore_errors=True)
