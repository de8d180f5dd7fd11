"""pyproject.toml, environment.yml and constraints.txt ask for the same things."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rattler import MatchSpec

import cluster

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
PIP_ONLY = {"kubernetes-validate"}  # left to pip, which installs the course itself
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge's name is not the one of the Python package


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(*groups: str) -> dict[str, SpecifierSet]:
    """Canonical name -> versions, of the dependencies and of the optional groups named."""
    lines = [*project()["dependencies"]]
    for group in groups:
        lines += project()["optional-dependencies"][group]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name): one.specifier for one in parsed}


def pins() -> dict[str, str]:
    """Canonical name -> version, of constraints.txt; each line must be `name==version`."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert match, f"constraints.txt: not `name==version`: {line!r}"
        name = canonicalize_name(match[1])
        assert name not in found, f"constraints.txt pins {name} twice"
        found[name] = match[2]
    return found


def conda() -> tuple[dict, dict[str, MatchSpec], list[str]]:
    """environment.yml: the whole, its conda packages by name, and what it leaves to pip."""
    whole = yaml.safe_load((ROOT / "environment.yml").read_text())
    lines = [item for item in whole["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in whole["dependencies"] if isinstance(item, dict)]
    specs = [MatchSpec(line, strict=True) for line in lines]
    return whole, {spec.name.normalized: spec for spec in specs}, pip


def test_environment_is_well_formed() -> None:
    whole, packages, pip = conda()
    assert set(whole) == {"name", "channels", "dependencies"}
    assert whole["name"] == project()["name"]
    assert whole["channels"] == ["conda-forge"]
    assert {"python", "pip"} <= set(packages)
    assert pip == ["-e ."]


def test_environment_and_pyproject_agree() -> None:
    _, packages, _ = conda()
    asked = needed("dev")
    left = {name: versions for name, versions in asked.items() if name not in PIP_ONLY}
    wanted = {CONDA_NAMES.get(name, name): versions for name, versions in left.items()}
    assert set(packages) - {"python", "pip"} == set(wanted)
    for name, versions in wanted.items():
        assert SpecifierSet(str(packages[name].version)) == versions, name
    python = SpecifierSet(str(packages["python"].version))
    floor = project()["requires-python"].removeprefix(">=")
    assert floor in python and "3.10" not in python


def test_windows_is_refused_in_one_line() -> None:
    code = "import os; os.name = 'nt'; import manyhands"
    how = {"capture_output": True, "text": True, "env": {"PYTHONPATH": str(ROOT / "scripts")}}
    done = subprocess.run([sys.executable, "-S", "-c", code], **how)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Many Hands needs Linux or macOS; on Windows install it in")


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for name, versions in needed("dev", "frameworks", "hub", "browser").items():
        assert name in pinned, f"constraints.txt does not pin {name}"
        assert pinned[name] in versions, f"{name}=={pinned[name]} is not {versions}"


def test_pins_allow_each_other() -> None:
    pinned = pins()
    faults = []
    for package in distributions():
        if pinned.get(canonicalize_name(package.name)) != package.version.partition("+")[0]:
            continue  # not the version that is pinned: its needs say nothing about ours
        for requirement in map(Requirement, package.requires or []):
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if name not in pinned and not requirement.marker:
                faults.append(f"{package.name} wants {requirement}, which is not pinned")
            elif name in pinned and not requirement.specifier.contains(pinned[name], True):
                faults.append(f"{package.name} wants {requirement}, pinned is {pinned[name]}")
    assert not faults


def test_no_package_is_fetched_from_a_place_of_its_own() -> None:
    for name in ("constraints.txt", "environment.yml", "pyproject.toml", "Makefile"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|file:|git\+|^-e [^.]", text, re.MULTILINE), name


# ---- what CI installs with the system's packages ----------------------------------------------


def packages(file: str = "packages") -> dict[str, str]:
    """Package -> a program or a file that comes with it, of a list in .ci/."""
    lines = (ROOT / ".ci" / file).read_text().splitlines()
    return dict(line.split() for line in lines)


def test_the_workflow_and_the_cluster_install_what_ci_asks_for() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    (install,) = [step["run"] for step in steps if "apt-get install" in step.get("run", "")]
    named = install.partition("--no-install-recommends ")[2]
    listed = subprocess.run(["bash", "-c", f"echo {named}"], cwd=ROOT, capture_output=True)
    assert listed.stdout.decode().split() == [*packages()]
    assert set(cluster.INSTALL.partition("recommends ")[2].split()) <= set(packages())
    assert set(cluster.PROGRAMS) <= set(packages().values())


def test_ci_as_a_plain_user_says_what_is_missing(tmp_path: Path) -> None:
    programs = {name for name in packages().values() if "/" not in name}
    for name in [*programs - {"shellcheck"}, "make", "python", "id"]:
        (tmp_path / name).write_text("#!/bin/bash\necho 1000 $*\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path), "PYTHON": "python"}
    done = subprocess.run(["bash", ROOT / ".ci/run"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    named = set(line.partition("--no-install-recommends")[2].split())
    assert "shellcheck" in named and named.isdisjoint({"munge", "slurmd", "iproute2"})


def ci_hub(tmp_path: Path, **programs: str) -> str:
    """What .ci/hub says as root where there are these programs alone and no network."""
    for name, text in {"id": "echo 0", **programs}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "mktemp", "rm", "tail", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(["bash", ROOT / ".ci/hub"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    return done.stdout


def test_ci_goes_on_where_no_hub_can_be_installed(tmp_path: Path) -> None:
    """One line says why: no apt-get; apt-get without a network; npm without one; a plain user."""
    cases = [tmp_path / name for name in ("bare", "apt", "npm", "plain")]
    for case in cases:
        case.mkdir()
    there = dict.fromkeys(packages("packages-hub").values(), "")
    offline = "echo; echo it is not reachable >&2; exit 100"
    said = [
        ci_hub(cases[0]),
        ci_hub(cases[1], **{"apt-get": offline}),
        ci_hub(cases[2], **there, make=offline),
        ci_hub(cases[3], id="echo 1000"),
    ]
    assert [text.count("\n") for text in said] == [1, 1, 1, 1]
    assert "nodejs npm chromium missing, and no apt-get" in said[0]
    assert "apt-get did not install" in said[1] and "not reachable" in said[1]
    assert "pip or npm did not" in said[2] and "takes root" in said[3]


def test_ci_fails_where_the_hub_does(tmp_path: Path) -> None:
    there = dict.fromkeys(packages("packages-hub").values(), "")
    with pytest.raises(AssertionError):
        ci_hub(tmp_path, **there, make='[ "$1" != hub ]')
