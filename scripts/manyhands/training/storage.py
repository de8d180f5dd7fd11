"""Whole files or none: what a run keeps on disk, and how it comes back.

    state.pt  ---written, fsync--->  step-00000100.partial/  ---os.replace--->  step-00000100/

Whatever is written goes to a name that ends in `.partial`, and gets its own name when all of it is
on the disk. A process may be killed at any moment: a name without `.partial` is whole.
Source: https://man7.org/linux/man-pages/man2/rename.2.html
"""

import json
import os
import pickle
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from manyhands.ranks.runtime import BadInput, first_line
from manyhands.training import lock

FORMAT = "manyhands run 1"

# ---- files -------------------------------------------------------------------------------------


def partial_name(path: Path) -> Path:
    """The name of `path` while it is being written."""
    return path.with_name(path.name + ".partial")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new one, never half of it."""
    partial = partial_name(path)
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    """Read a JSON object; BadInput where `path` holds something else."""
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadInput(f"{path} cannot be read as JSON: name a new folder, or delete this one")
    return value


def stored(lesson: str, name: str) -> dict:
    """What a run of a lesson's job gave, kept in its room; prints how to make it anew."""
    found = read_json(Path(__file__).resolve().parents[1] / lesson / f"stored_{name}.json")
    print(f"stored run, not from here: {found['remake']}")
    where = f"torch {found['torch']}, {found['ranks']} ranks on {found['device']}"
    print(f"made on {found['date']} with {where}")
    return found


def read_lines(path: Path) -> list[dict]:
    """The JSON objects of a file, one a line; a half-written last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise BadInput(f"{path}, line {number}, is not JSON: delete that line") from None
    return rows


def write_state(state: dict, path: Path) -> None:
    """Save with torch and wait for the disk; a disk that refuses is an OSError."""
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as problem:
            # torch hides the disk's own words behind an error about its zip writer.
            raise OSError(first_line(problem.__context__ or problem)) from None
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path, names: set[str]) -> dict:
    """Load a file of a checkpoint on the CPU; BadInput where it does not hold `names`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        reason = "it is not a checkpoint of a run"
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        state, reason = None, first_line(problem)
    if not isinstance(state, dict) or not names <= state.keys():
        raise BadInput(
            f"{path} cannot be read ({reason}): delete {path.parent} to go on from the one before"
        )
    return state


# ---- the folder of a run -----------------------------------------------------------------------


def open_folder(
    out: str, name: str, about: dict, inside: Sequence[str] = ("checkpoints", "ranks")
) -> Path:
    """Make the folder of a run, or accept the one that is there, and write `config.json` into it.

    Args:
        out: the folder; empty takes the next free one, runs/`name`-001 and so on.
        about: what `config.json` says. Its "identity" has to be equal for a run to go on.
        inside: folders to make in it.

    Raises:
        BadInput: `out` holds something else, another run, or a finished one, or another process
            writes into it.
    """
    folder = Path(out) if out else next_free(Path("runs"), name)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: name a folder")
    if (folder / "config.json").exists():
        _accept(folder, about)
    elif folder.exists() and any(
        path.suffix != ".partial" and path.name != lock.NAME for path in folder.iterdir()
    ):
        raise BadInput(f"--out {folder} holds files but no run: name a new or empty folder")
    lock.hold(folder)
    for path in (folder, *(folder / name for name in inside)):
        path.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", about)
    return folder


def write_status(folder: Path, status: dict) -> None:
    """Write how a run stands; `status` holds at least its "state"."""
    write_json(folder / "status.json", {**status, "time_s": time.time()})


def write_end(folder: Path, status: dict) -> None:
    """Write how a run ended, and unlock its folder; one that still counts as running has failed."""
    try:
        if status["state"] != "running":
            write_status(folder, status)
            return
        with suppress(OSError):  # a full disk may be the very reason, and has been told
            write_status(folder, {**status, "state": "failed"})
    finally:
        lock.release(folder)


def next_free(runs: Path, name: str) -> Path:
    """Make and return the first of `name`-001, `name`-002, ... that is not there yet."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (runs / f"{name}-{number:03d}").mkdir()
            return runs / f"{name}-{number:03d}"
        except FileExistsError:  # also when another job was quicker
            number += 1


def _accept(folder: Path, about: dict) -> None:
    """Check that the run in `folder` is the one that `about` tells of, and unfinished."""
    theirs, status = read_json(folder / "config.json"), folder / "status.json"
    if theirs.get("format") != about["format"]:
        raise BadInput(f"--out {folder} holds another kind of run: name a new folder")
    differences = _differences(theirs.get("identity"), about["identity"])
    if differences:
        raise BadInput(
            f"--out {folder} holds a run with {differences}: take its settings, or name a new "
            "folder"
        )
    if status.exists() and read_json(status).get("state") == "finished":
        raise BadInput(
            f"--out {folder} holds a finished run of {about['config']['steps']} steps: name a new "
            "folder, or delete this one"
        )


def _differences(theirs: object, ours: dict) -> str:
    """What differs, in words: "layers=4, not 2". Empty when nothing does."""
    if not isinstance(theirs, dict):
        return "settings that cannot be read"
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    words = [f"{name}={theirs.get(name)}, not {ours.get(name)}" for name in names[:3]]
    return "; ".join(words) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- checkpoints -------------------------------------------------------------------------------


def write_checkpoint(final: Path, rank: int, shared: dict, own: dict) -> None:
    """Write this rank's part of the checkpoint `final`, still under its partial name.

    Args:
        shared: what is the same on every rank ("identity", "step", "model", "optimizer"); rank 0
            writes it.
        own: what only this rank has ("rng", and those of "model" and "optimizer" that are shards).

    Raises:
        BadInput: the disk refuses.
    """
    partial = partial_name(final)
    try:
        partial.mkdir(exist_ok=True)
        if rank == 0:
            write_state({"format": FORMAT, **shared}, partial / "state.pt")
        write_state(own, partial / f"rank-{rank:05d}.pt")
    except OSError as problem:
        raise BadInput(
            f"rank {rank} cannot write {partial}: {problem}; free some space. The checkpoints "
            "before it are kept"
        ) from None


def publish(final: Path, num_kept: int) -> None:
    """Give a checkpoint that every rank has written its name, and drop all but the newest."""
    _sync_folder(partial_name(final))
    os.replace(partial_name(final), final)
    _sync_folder(final.parent)
    for old in _checkpoints(final.parent)[:-num_kept]:
        # Half a checkpoint must not look like a whole one, also while it is being deleted.
        os.replace(old, partial_name(old))
        shutil.rmtree(partial_name(old))


def newest_checkpoint(folder: Path) -> Path | None:
    """Clear away what a killed process left in `folder`, and return the newest whole one."""
    for left in folder.glob("*.partial"):
        shutil.rmtree(left)
    return max(_checkpoints(folder), default=None)


def load_checkpoint(
    checkpoint: Path, rank: int, identity: dict, model: nn.Module, optimizer: Optimizer | None
) -> tuple[int, dict]:
    """Set `model` and, if given, `optimizer`; returns the step and the random numbers of this rank.

    Raises:
        BadInput: a file cannot be read, or belongs to another run than `identity`, or to another
            model or optimizer.
    """
    shared = read_state(checkpoint / "state.pt", {"format", "identity", "step"})
    own = read_state(checkpoint / f"rank-{rank:05d}.pt", {"rng"})
    remedy = f"delete {checkpoint}, or name a new --out"
    if shared["format"] != FORMAT:
        raise BadInput(f"{checkpoint} has another format ({shared['format']}): {remedy}")
    differences = _differences(shared["identity"], identity)
    if differences:
        raise BadInput(f"{checkpoint} was saved with {differences}: {remedy}")
    states = {**shared, **own}
    try:
        theirs = {name: list(t.shape) for name, t in states["model"].items()}
        ours = {name: list(t.shape) for name, t in local(model.state_dict()).items()}
        differences = _differences(theirs, ours)
        if differences:
            raise BadInput(f"{checkpoint} holds another model, with {differences}: {remedy}")
        load_local(model, optimizer, states)
    except (ValueError, RuntimeError, KeyError, AttributeError) as problem:
        raise BadInput(f"{checkpoint} does not fit: {first_line(problem)}: {remedy}") from None
    return shared["step"], own["rng"]


def local(state: object) -> object:
    """A state_dict with this rank's own part in place of every DTensor."""
    return tree_map(lambda leaf: leaf.to_local() if is_dtensor(leaf) else leaf, state)


def is_dtensor(value: object) -> bool:
    """Is it a tensor of which every rank holds a part?"""
    return hasattr(value, "to_local")  # to import the class takes 0.6 s


def load_local(model: nn.Module, optimizer: Optimizer | None, states: dict) -> None:
    """Set `model` and, if given, `optimizer` to what `local` made of their states."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            local(value).copy_(states["model"][name])
    if optimizer is None:
        return
    state = states["optimizer"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in state["state"].items():
        for name, value in values.items():
            if is_dtensor(params[number]) and value.dim() > 0:
                values[name] = _as_part_of(params[number], value)
    optimizer.load_state_dict(state)


def _as_part_of(param: Tensor, value: Tensor) -> Tensor:
    """The DTensor that is cut as `param` is, and of which this rank's part is `value`."""
    how = {"run_check": False, "shape": param.shape, "stride": param.stride()}
    value = value.to(param.to_local().device)
    return type(param).from_local(value, param.device_mesh, param.placements, **how)


def _checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")


def _sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, not only in the system's memory."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- random numbers ----------------------------------------------------------------------------


def get_rng(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers from where `get_rng` found them."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
