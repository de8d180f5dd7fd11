"""Users of one machine who judge answers and keep them side by side, without a browser.

    faults(["ann", "bob"], 25, 0o077)    25 checks for each, at once; a line for each that failed

Each is a process of that user's, in a new folder of his home, with this umask. It checks the
course's own answers of four exercises in turn, whose ranks meet, save files and prepare data.
"""

import json
import os
import pwd
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

LIMIT_S = 300
EXERCISES = (("collectives", "4.2"), ("ddp", "6.1"), ("first_job", "0.2"), ("ddp", "6.6"))


def faults(users: list[str], count: int, umask: int) -> list[str]:
    """Start one process a user, and wait for all; [] where each check was done and all is his."""
    processes = {}
    for user in users:
        who = pwd.getpwnam(user)
        environ = {"HOME": who.pw_dir, "USER": user, "PATH": os.environ["PATH"]}
        words = [sys.executable, "-m", "side_by_side", f"umask-{umask:03o}", str(count)]
        environ["PYTHONPATH"] = str(Path(__file__).parent)
        processes[user] = subprocess.Popen(
            words,
            cwd=who.pw_dir,
            env=environ,
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
            umask=umask,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = []
    for user, process in processes.items():
        said, _ = process.communicate(timeout=LIMIT_S)
        lines = said.splitlines() or [f"ended with {process.returncode}, and said nothing"]
        found += [f"{user}, umask {umask:03o}: {line}" for line in json.loads(lines[-1])]
        found += [f"{user}, umask {umask:03o}: {line}" for line in not_closed(user, umask)]
    return found


def not_closed(user: str, umask: int) -> list[str]:
    """Files of his work that are not his, or that are code and that others could change."""
    uid, home = pwd.getpwnam(user).pw_uid, Path(pwd.getpwnam(user).pw_dir)
    mine = home / f"umask-{umask:03o}/mine"
    kept = [mine, *mine.glob("*.py")]
    paths = [*kept, *(home / "manyhands-work").rglob("*")]
    return (
        [f"{path} belongs to another" for path in paths if path.stat().st_uid != uid]
        + [f"{path} can be written by all" for path in kept if path.stat().st_mode & 0o022]
        + ([] if len(kept) > 1 else ["nothing was kept"])
    )


def judge(count: int) -> list[str]:
    """Check and keep, so often; what was not done."""
    found = []
    for number in range(count):
        word, todo = EXERCISES[number % len(EXERCISES)]
        checks = import_module(f"manyhands.checks.{word}")
        exercise = checks.lesson.exercises[todo]
        check = getattr(checks, exercise.name)
        with redirect_stdout(sys.stderr):
            try:
                check(exercise.spec.truth)
                checks.lesson.keep()
            except Exception as error:
                found.append(f"{word} {todo}: {type(error).__name__}: {error}")
        if exercise.verdict.state != "done":
            found.append(f"{word} {todo}: {exercise.verdict!r}")
    return found


if __name__ == "__main__":
    folder, count = sys.argv[1:]
    os.mkdir(folder)
    os.chdir(folder)
    print(json.dumps(judge(int(count))))
