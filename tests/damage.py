"""Damage the checkpoints of a training at random, and see that every damage is found.

    python tests/damage.py --damages 50 --seed 1

A job of two ranks trains sharded and is killed. Of what it has left, a copy is damaged: a file, or
one in each of the two newest checkpoints, is cut short, or has one bit changed, or is missing, or
has changed places with another of its checkpoint, or comes from an older one. Then the job is
started again. It has to say what it found, to go on from the newest checkpoint that nothing
happened to, and to end with the losses and weights, bit for bit, of a job without any damage.

At last a disk fills up in the middle of a save: a small file system in memory, in a namespace of
its own, which ends with the process. What was saved before has to be intact.

Exit codes: 0, or 1 when a damage was not found or something was lost.
"""

import argparse
import contextlib
import io
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from commands import losses, make_clone, settings
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.saving.folder import complete, newest_intact
from manyhands.training.run import Run

KINDS = ("cut short", "bit changed", "missing", "swapped", "from an older one")
STEPS, SAVE_EVERY, KILLED_AT = 20, 3, 19


class Lost(Exception):
    """What a damage has cost that it should not have."""


def expect(condition: object, words: str) -> None:
    if not condition:
        raise Lost(words)


# ---- the job -------------------------------------------------------------------------------------


def train(clone: Path, out: Path, store: Path | str = "", killed_at: int = 0) -> str:
    """Run the program of lesson 11 on two ranks, to its end or to a kill; what rank 0 printed."""
    given = settings(clone, out=str(out), store=str(store), steps=STEPS, save_every=SAVE_EVERY)
    script = str(clone / "scripts" / "train_checkpoint.py")

    def rank() -> None:
        log = Run.log

        def log_and_die(run: Run, loss: object) -> None:
            log(run, loss)
            if run.step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

        Run.log = log_and_die
        program = runpy.run_path(script)
        program["main"](program["Config"](**given))

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_ranks(rank, 2, join=False, timeout_s=120)
    return printed.getvalue()


def started_and_killed(clone: Path, out: Path) -> list[str]:
    """A run that was killed; the names of its checkpoints, oldest first."""
    with contextlib.suppress(RankFailed):
        train(clone, out, killed_at=KILLED_AT)
    names = complete(out / "checkpoints")
    expect(len(names) >= 3, f"the killed run has left {names}")
    return names


def same(out: Path, calm: Path) -> None:
    """See that a run has ended as if nothing had been."""
    expect(losses(out) == losses(calm), "the losses differ from the undisturbed run's")
    ours, theirs = ((one / "model.pt").read_bytes() for one in (out, calm))
    expect(ours == theirs, "the final weights differ from the undisturbed run's")


# ---- the damage ----------------------------------------------------------------------------------


def spoil(checkpoint: Path, older: Path, kind: str, draw: random.Random) -> str:
    """Damage a file of a checkpoint; returns its name."""
    path = draw.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    if kind == "cut short":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "bit changed":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    elif kind == "missing":
        path.unlink()
    elif kind == "swapped":
        other = draw.choice([one for one in sorted(checkpoint.iterdir()) if one != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        path.write_bytes((older / path.name).read_bytes())
    return path.name


def damage_once(
    clone: Path, left: Path, calm: Path, kind: str, num_damaged: int, draw: random.Random
) -> str:
    """Damage the newest `num_damaged` checkpoints of a copy of a run, and go on; says what."""
    with tempfile.TemporaryDirectory(dir=clone) as folder:
        out = Path(folder) / "run"
        shutil.copytree(left, out)
        saved = out / "checkpoints"
        names = complete(saved)
        intact, *damaged = names[-num_damaged - 1 :]
        files = [spoil(saved / name, saved / names[0], kind, draw) for name in damaged]
        said = train(clone, out)
        where = f"{kind}: {', '.join(map('/'.join, zip(damaged, files, strict=True)))}"
        for name in damaged:
            expect(f"{saved}/{name}" in said, f"{where}: nothing was said of {name}:\n{said}")
        wanted = f"resumed {out} at step {int(intact[5:])} of {STEPS}"
        expect(wanted in said, f"{where}: it did not go on from {intact}:\n{said}")
        expect("Traceback" not in said, f"{where}:\n{said}")
        same(out, calm)
    return f"{where}: resumed from {intact}"


def damages(clone: Path, count: int, draw: random.Random) -> None:
    """All damages, as many of each kind, and one line that says what came of them."""
    calm, left = clone / "calm", clone / "left"
    train(clone, calm)
    started_and_killed(clone, left)
    processes = len(psutil.Process().children(recursive=True))
    for number in range(1, count + 1):
        kind = KINDS[number % len(KINDS)]
        told = damage_once(clone, left, calm, kind, draw.choice((1, 1, 2)), draw)
        alive = len(psutil.Process().children(recursive=True)) - processes
        expect(alive <= 0, f"{alive} processes left")
        print(f"{number:2d}. {told}", flush=True)
    kinds = Counter(KINDS[number % len(KINDS)] for number in range(1, count + 1))
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    print(
        f"{count} damages ({told}): every one found, and each time the newest intact checkpoint "
        "loaded, final weights bit-identical to the undisturbed run's, 0 processes left"
    )


# ---- a disk that fills up ------------------------------------------------------------------------


def full_disk(clone: Path) -> None:
    """Save on a disk that has room for two checkpoints and a half; then for more, and go on."""
    calm, out, disk = clone / "calm", clone / "full", clone / "disk"
    if not calm.exists():
        train(clone, calm)
    one = complete(calm / "checkpoints")[-1]
    size = sum(path.stat().st_size for path in (calm / "checkpoints" / one).iterdir())
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk), "-o"]
    subprocess.run([*mount, f"size={int(2.5 * size)}"], check=True)
    said = ""
    try:
        train(clone, out, disk / "store")
    except RankFailed as failed:
        said = str(failed)
    name = "step-00000009"
    told = ("cannot save", "No space left on device", name, "free some space")
    expect(all(words in said for words in told), f"the disk did not fill up: {said}")
    found = run_ranks(newest_intact, 2, str(disk / "store"))[0]
    expect(found == ("step-00000006", []), f"after the disk was full there is {found}")
    subprocess.run([*mount, f"remount,size={10 * size}"], check=True)
    said = train(clone, out, disk / "store")
    expect(f"resumed {out} at step 6 of {STEPS}" in said, said)
    same(out, calm)
    print(f"a disk of {2.5 * size / 1e6:.1f} MB was full while {name} was saved: nothing was lost")


def own_mounts() -> list[str]:
    """The words before a command that let it mount for itself alone; [] where that is forbidden."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    words = ["unshare", "--mount", *as_root]
    if shutil.which("unshare") is None:
        return []
    attempt = [*words, "sh", "-c", 'mount -t tmpfs tmpfs "$0" -o size=1m', tempfile.gettempdir()]
    return [] if subprocess.run(attempt, capture_output=True, check=False).returncode else words


def fill_a_disk(clone: Path) -> bool:
    """Do `full_disk` in a process that may mount; False where there is none, with the reason."""
    if not (words := own_mounts()):
        print("no disk was filled up: this machine does not let us mount one", flush=True)
        return False
    command = [*words, sys.executable, __file__, "--disk", str(clone)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    print(done.stdout, end="", flush=True)
    expect(done.returncode == 0, f"a full disk: {done.stderr}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--damages", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--disk", default="", help="only fill up a disk; with a clone")
    options = parser.parse_args()
    try:
        if options.disk:
            full_disk(Path(options.disk))
            return 0
        print(f"seed {options.seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            clone = make_clone(Path(folder))
            damages(clone, options.damages, random.Random(options.seed))
            fill_a_disk(clone)
    except (Lost, RankFailed) as problem:
        print(f"damage: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
