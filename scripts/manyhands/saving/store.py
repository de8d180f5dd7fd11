"""Files by address: a folder of this machine, or a bucket of an object store.

    Store("runs/ddp-001/checkpoints")        Store("s3://bucket/ddp-001")

A name that is there is whole. In a folder a file is written under another name, which it loses when
all of it is on the disk (rename is atomic). An object store has no rename, and needs none: an
object appears when its upload is complete (remote.py).

Price: a wait for the disk a file (fsync), or an upload.
Sources: https://filesystem-spec.readthedocs.io (fsspec, which torch and the datasets library use
as well); https://man7.org/linux/man-pages/man2/rename.2.html.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from manyhands.saving import remote

PARTIAL = ".partial"
PROBE = ".writable"


class Store:
    """The files below one address."""

    def __init__(self, address: str | Path) -> None:
        """Use what lies at `address`: a path, or scheme://..., for which fsspec has to know how.

        Raises:
            ValueError: nothing that is installed can read such an address.
        """
        self.address = str(address).rstrip("/")
        self.files, self.path = LocalFileSystem(), os.path.abspath(os.path.expanduser(self.address))
        if "://" in self.address:  # in a plain path, fsspec would take `::` for a chain of stores
            options = remote.options(self.address)
            try:
                self.files, self.path = fsspec.core.url_to_fs(self.address, **options)
            except (ValueError, ImportError) as problem:
                raise ValueError(f"{self.address} cannot be opened: {problem}") from None
        self.is_local = isinstance(self.files, LocalFileSystem)
        if not self.is_local:
            self.files.retries = remote.TRIES  # of s3fs; others do not look at it

    def below(self, name: str) -> "Store":
        """The files of a folder in this one."""
        return Store(f"{self.address}/{name}")

    def write(self, name: str, fill: Callable[[IO[bytes]], object]) -> dict[str, object]:
        """Have `fill` write a file; returns its {"bytes", "sha256"} as they left this process.

        Raises:
            OSError: the disk or the store refuses; then the file before it, if any, is still there.
        """
        final = f"{self.path}/{name}"
        if not self.is_local:
            to_file = partial(_fill, fill=fill, in_words=self._in_words)
            return remote.upload(self.files, final, to_file, self.address)
        try:
            os.makedirs(os.path.dirname(final), exist_ok=True)
            return write_whole(final, lambda file: _fill(file, fill))
        except OSError as problem:
            if problem.filename is None:  # "No space left on device" alone helps nobody
                problem.filename = f"{self.address}/{name}"
            raise

    def try_out(self) -> None:
        """Write a small file and remove it: a run should hear at its start that it cannot save.

        Raises:
            OSError: nothing can be written here.
        """
        self.write(PROBE, lambda file: file.write(b"can this be written?"))
        self.remove(PROBE)

    def write_json(self, name: str, value: Mapping) -> None:
        """Write a JSON object, whole or not at all."""
        text = json.dumps(value, indent=1)
        self.write(name, lambda file: file.write(text.encode()))

    def read_json(self, name: str) -> dict:
        """Read a JSON object.

        Raises:
            ValueError: there is none, or it cannot be read.
            Away: an object store is out of reach, which says nothing about the file.
        """
        try:
            with self._in_words():
                content = self.files.cat_file(f"{self.path}/{name}")
            value = json.loads(content)
        except remote.Away:
            raise
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{self.address}/{name} is missing or damaged")
        return value

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading; it can be moved about in. An object is fetched into memory."""
        path = f"{self.path}/{name}"
        if self.is_local:
            return self.files.open(path, "rb")
        with self._in_words():
            return io.BytesIO(self.files.cat_file(path))

    def sums(self, name: str) -> dict[str, object] | None:
        """The {"bytes", "sha256"} of a file as it is now; None where it cannot be read.

        Raises:
            Away: an object store is out of reach, which says nothing about the file.
        """
        digest, count = hashlib.sha256(), 0
        try:
            with self._in_words(), self.files.open(f"{self.path}/{name}", "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    count += len(block)
        except remote.Away:
            raise
        except OSError:
            return None
        return {"bytes": count, "sha256": digest.hexdigest()}

    def has(self, name: str) -> bool:
        """Is there such a file?"""
        with self._in_words():
            return self.files.exists(f"{self.path}/{name}")

    def folders(self) -> list[str]:
        """Names of the folders here, in order."""
        with self._in_words():
            if not self.files.exists(self.path):
                return []
            found = self.files.ls(self.path, detail=True)
        names = (one["name"] for one in found if one["type"] == "directory")
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, where it is there."""
        path = f"{self.path}/{name}"
        with self._in_words():
            if self.files.exists(path):
                self.files.rm(path, recursive=True)

    def move(self, name: str, new_name: str) -> None:
        """Give a folder another name. An object store copies each file and removes the old one."""
        with self._in_words():
            old, new = f"{self.path}/{name}", f"{self.path}/{new_name}"
            if self.is_local:
                os.rename(old, new)
                return
            for path in self.files.find(old):
                self.files.cp_file(path, new + path[len(old) :])
            self.files.rm(old, recursive=True)

    def _in_words(self) -> AbstractContextManager:
        return nullcontext() if self.is_local else remote.in_words(self.address)


class Summed:
    """A file that is being written, and the sum of its bytes."""

    def __init__(self, file: IO[bytes], in_words: Callable = nullcontext) -> None:
        self.file, self.digest, self.count = file, hashlib.sha256(), 0
        self.in_words = in_words
        self.problem: OSError | None = None  # torch.save hides the disk's own words

    def write(self, block: bytes) -> int:
        """Pass a block on."""
        try:
            with self.in_words():
                self.file.write(block)
        except OSError as problem:
            self.problem = problem
            raise
        self.digest.update(block)
        self.count += len(block)
        return len(block)

    def flush(self) -> None:
        """Pass it on."""
        self.file.flush()


def _fill(
    file: IO[bytes], fill: Callable[[IO[bytes]], object], in_words: Callable = nullcontext
) -> dict[str, object]:
    summed = Summed(file, in_words)
    try:
        fill(summed)
    except RuntimeError:
        if summed.problem is None:
            raise
        raise summed.problem from None
    return {"bytes": summed.count, "sha256": summed.digest.hexdigest()}


def write_whole(path: str | Path, fill: Callable[[IO[bytes]], object]) -> object:
    """Have `fill` write a file at `path`; whoever looks there finds the old file or the new one.

    That holds when the process is killed at any moment, and when the machine loses its power. When
    this returns, the new file would outlive that, too.

    Args:
        path: in a folder that is there, or a name alone in the working folder; with or without an
            older file. Files of other names may be written beside it at the same time.
        fill: is called once, with a file that is open for writing bytes.

    Returns:
        What `fill` returned.

    Raises:
        OSError, or what `fill` raises: then the old file is as it was, and nothing is left beside.
            Only an error of sync_folder comes when the new file has taken the name.
    """
    partial = f"{path}{PARTIAL}"
    try:
        with open(partial, "wb") as file:
            result = fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)  # a full disk needs the room
        raise
    sync_folder(os.path.dirname(path))
    return result


def sync_folder(folder: str | Path) -> None:
    """Wait until the names in a folder are on the disk, not only in the system's memory.

    An empty text is the working folder, as os.path.dirname says it.
    """
    descriptor = os.open(folder or os.curdir, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
