"""What no other user of this machine can reach: a folder for the ranks of a job, and their store.

    MANYHANDS_ROOM    <temporary folder>/manyhands-k2j3h4, open to this user alone
    MANYHANDS_STORE   .../store: ranks with MASTER_PORT=... meet over the file store-...

torch's own meeting place is a port that every user of the machine can join, on every address. Who
does so reads and changes what it holds, and with it where the ranks look for each other. So ranks
that find the second variable meet there, whoever asks for their group: the course, a learner's
function or a framework. On several nodes it is not set, and ranks meet as torch has it.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import FileStore, Store

ROOM, STORE = "MANYHANDS_ROOM", "MANYHANDS_STORE"
PREFIX = "manyhands-"
PR_SET_PDEATHSIG = 1
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@contextmanager
def made_room() -> Iterator[Path]:
    """A new room, which goes at the end with all that is in it."""
    folder = make_room()
    try:
        yield folder
    finally:
        clear(folder)


def make_room(where: Path | None = None) -> Path:
    """A new room: of mode 0700, under a name that was not there.

    Args:
        where: another room, in which it lies; FileNotFoundError if that was removed meanwhile.
    """
    if where and where.stat().st_uid != os.getuid():  # somebody has made it anew
        raise FileNotFoundError(where)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))


def clear(folder: Path | None) -> None:
    """Remove a room; nothing where it is none."""
    if folder and folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def room() -> Path | None:
    """The room of this rank's job, if it has one."""
    return Path(os.environ[ROOM]) if ROOM in os.environ else None


def store() -> "FileStore | None":
    """The store of this job, if it is a file.

    Raises:
        DistNetworkError: its room is gone, since the job has ended.
    """
    from torch.distributed import DistNetworkError, FileStore  # seconds, and not everybody meets

    if STORE not in os.environ:
        return None
    path = f"{os.environ[STORE]}-{os.environ['MASTER_PORT']}"
    # Where the folder is gone, FileStore waits for it for five minutes, and holds Python's lock:
    # no thread of this process could end it. Linux ends it then, should its parent go meanwhile.
    _end_with_parent(True)
    try:
        if not os.path.isdir(os.path.dirname(path)):
            raise DistNetworkError(f"the job's folder {os.path.dirname(path)} is gone")
        return FileStore(path)
    finally:
        _end_with_parent(False)


def _end_with_parent(is_wanted: bool) -> None:
    if sys.platform == "linux":
        number = signal.SIGKILL if is_wanted else 0
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def meet_in_room() -> None:
    """Have init_process_group() meet over a file where one is set; it asks for env:// then.

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
        elif STORE in os.environ:
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
    except RuntimeError:
        return  # without a home torch has to take its own
    folder = caches / "manyhands" / "torchinductor"  # torch makes it when it compiles
    there = next(one for one in folder.parents if one.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


keep_caches()  # torch looks when it is imported
