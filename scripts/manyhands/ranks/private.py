"""What no other user of this machine can reach: a folder for the ranks of a job, and their store.

    MANYHANDS_ROOM = <temporary folder>/manyhands-k2j3h4     open to this user alone
        store-...        the ranks of one MASTER_PORT meet here, over a file
        data-0, ...      what else they share

torch's own meeting place is a port that every user of the machine can join, on every address. Who
does so reads and changes what it holds, and with it where the ranks look for each other. So ranks
that have a room meet there, whoever asks for their group: the course, a learner's function or a
framework. Ranks on several nodes have none, and meet as torch has it.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import FileStore, Store

ROOM = "MANYHANDS_ROOM"
PREFIX = "manyhands-"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@contextmanager
def made_room() -> Iterator[Path]:
    """A new room, which goes at the end with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # of mode 0700, under a name that was not there
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def room() -> Path:
    """The room of this rank's job."""
    return Path(os.environ[ROOM])


def clear(folder: str | None) -> None:
    """Remove a room whose maker was killed; nothing where it is none."""
    if folder and Path(folder).name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def store() -> "FileStore | None":
    """The store in this job's room; None where it has no room."""
    from torch.distributed import FileStore  # takes seconds, and not everybody meets

    if ROOM not in os.environ:
        return None
    return FileStore(str(room() / f"store-{os.environ['MASTER_PORT']}"))


def meet_in_room() -> None:
    """Have init_process_group() meet in the room where there is one; it asks for env:// then.

    A process that is alone needs no port either.
    """
    from torch.distributed import HashStore
    from torch.distributed.rendezvous import _rendezvous_handlers as handlers

    torchs_own = handlers["env"]

    def handler(url: str, **options: object) -> "Iterator[tuple[Store, int, int]]":
        given = dict(pair.split("=") for pair in url.partition("?")[2].split("&") if pair)
        rank = int(given.get("rank", os.environ.get("RANK", 0)))
        world_size = int(given.get("world_size", os.environ.get("WORLD_SIZE", 0)))
        if world_size == 1 and os.environ.get("MASTER_PORT") == "0":
            yield HashStore(), rank, world_size
        elif ROOM in os.environ:
            yield store(), rank, world_size
        else:
            yield from torchs_own(url, **options)

    handlers["env"] = handler


def keep_caches() -> None:
    """Have torch look for compiled code in this user's own folder, since it runs what is there.

    By itself it looks in the temporary folder, under a name that others can guess and make first.
    """
    if "MANYHANDS_BATCH" in os.environ:
        return  # launch.py has set a folder on the node's own disk
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "manyhands" / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # without a home that can be written, torch has to take its own
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


keep_caches()  # torch looks when it is imported
