"""What differs where the files lie in an object store: waits, errors, and how a file appears there.

    open --> part | part | part --> commit      only now others see the object, all of it
                           '------> discard     and so nobody ever sees half of it

Addresses of such a store: s3://bucket/run, through the package s3fs. Where its server is and who
may write come from the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.

Price: one request per file of up to 8 MiB, and one per 8 MiB of a larger one. The parts that a
killed process has uploaded stay in the bucket, unseen and paid for, until a rule of the bucket
removes them.
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from fsspec import AbstractFileSystem

ANSWER_S = 30  # how long a store may be silent
TRIES = 3  # with ANSWER_S each, less than the ranks wait for each other
PART_BYTES = 8 << 20  # so that a slow line carries a part within ANSWER_S


class Away(OSError):
    """A store does not answer or refuses; that says nothing about the files in it."""


def options(address: str) -> dict[str, object]:
    """What the file system of an address is made with."""
    found: dict[str, object] = {"use_listings_cache": False}  # other ranks write there, too
    if address.startswith("s3://"):
        found["default_block_size"] = PART_BYTES
        found["max_concurrency"] = 2
        found["config_kwargs"] = {
            "connect_timeout": ANSWER_S,
            "read_timeout": ANSWER_S,
            "retries": {"total_max_attempts": 1},  # s3fs itself tries again
        }
    return found


@contextmanager
def in_words(address: str) -> Iterator[None]:
    """Have the errors of a store's own library come out in a line that names the address.

    Raises:
        FileNotFoundError: there is no such file, or no such bucket.
        Away: anything else.
    """
    try:
        yield
    except FileNotFoundError as problem:
        raise FileNotFoundError(f"{address}: {problem}") from None
    except Exception as problem:
        words = str(problem).split("\n")[0] or type(problem).__name__
        raise Away(f"{address}: {words}") from None


def upload(
    files: AbstractFileSystem, path: str, fill: Callable[[IO[bytes]], object], address: str
) -> object:
    """Have `fill` write an object, which appears when it has returned; returns what it returned.

    Raises:
        OSError, or what `fill` raises: then the object is as it was before.
    """
    with in_words(address):
        file = files.open(path, "wb", autocommit=False)
    try:
        result = fill(file)
        with in_words(address):
            file.close()
            file.commit()
    except BaseException:
        with suppress(Exception):  # a store out of reach keeps the parts, and was told already
            file.discard()
        file.closed = True  # otherwise Python would close it later, which uploads what it has
        raise
    return result
