"""Fetch and check the text or the images that a job will need. Run it where there is internet.

    python scripts/prepare_data.py --data wikitext-2 --vocab 4096
    python scripts/prepare_data.py --data mnist

The compute nodes of a cluster have no internet, but they read the same home folder as the login
node. What this script leaves in the cache folder there is what `--data wikitext-2` reads.
"""

import hashlib
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import getproxies, urlopen

import numpy as np
import torch

from manyhands.data import corpus, images
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line, first_line


@dataclass(frozen=True)
class Config:
    """What to prepare."""

    data: str = "wikitext-2"
    """wikitext-2, mnist, fashion-mnist, embedded, a folder of text files, or one text file"""
    splits: str = ""
    """which of a folder's files are for what: joined, or train=PATTERN,test=PATTERN and so on"""
    vocab: int = 0
    """0 for characters, else the number of byte pairs to learn and to keep in the cache"""


def main(config: Config) -> None:
    """Fetch the data where it is not here yet, read it as a job would, and say what was found."""
    path = Path(os.path.expanduser(config.data))
    if config.vocab and config.data in images.HUB:
        raise BadInput(f"--vocab is for text: leave it out with --data {config.data}")
    if config.data in corpus.HUB or config.data in images.HUB:
        path = fetch(config.data)
    if config.data in images.HUB:
        note = images.load(config.data).note
        program = "train_batch_size.py"
    else:
        note = corpus.load(config.data, 1, config.vocab, splits=config.splits).note
        program = "train_ddp.py"
    print(note)
    if config.data != "embedded":
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                content = file.read_bytes()
                sha256 = hashlib.sha256(content).hexdigest()
                print(f"{file}: {len(content):,} bytes, sha256 {sha256}")
    flags = ["--data", config.data]
    flags += ["--vocab", str(config.vocab)] if config.vocab else []
    flags += ["--splits", config.splits] if config.splits else []
    script = str(Path(__file__).with_name(program))
    print(f"next: {corpus.program('launch.py', script, *flags)}")


def fetch(name: str) -> Path:
    """Return the folder with the files of a hub data set, fetching it if it is not there.

    Raises:
        BadInput: it is not there, and the hub cannot be reached or has no such data set.
    """
    folder = corpus.cache_folder() / name
    if folder.exists():
        return corpus.fetched(name)
    repository, subset = {**corpus.HUB, **images.HUB}[name]
    if not os.environ.get("HF_ENDPOINT"):
        os.environ.pop("HF_ENDPOINT", None)  # `datasets` takes an empty one for an address
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if not hub.startswith(("http://", "https://")):
        raise BadInput(f"HF_ENDPOINT is {hub!r}: give an address that begins with https://")
    away = "" if "HF_HUB_OFFLINE" in os.environ else unreachable(hub)
    if away:
        # Otherwise `datasets` tries for half a minute. It reads this when it is imported, and
        # still finds what it has in its own cache.
        os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    try:
        splits = datasets.load_dataset(repository, subset)
        _store(image_files(splits) if name in images.HUB else text_files(splits), folder)
    except Exception as error:  # of many kinds: network, cache, disk, a changed data set
        source = f"{repository}, {subset}" if subset else repository
        raise BadInput(
            f"cannot fetch {name} ({source}) into {folder}: {first_line(error)}{away}. Run "
            f"`{corpus.program('prepare_data.py', '--data', name)}` on a machine with internet (on "
            "a cluster the login node), or take --data FOLDER or --data embedded"
        ) from error
    return folder


def unreachable(address: str, timeout_s: float = 5) -> str:
    """Why no web server answers at `address`, in words to add; "" where one does.

    It is asked through the proxy where one is set.
    """
    try:
        urlopen(address, timeout=timeout_s).close()
    except HTTPError:
        return ""
    except URLError as error:
        if isinstance(error.reason, ssl.SSLError):  # there, but signed by one Python trusts not
            return ""
        problem = str(error.reason)
    except (OSError, HTTPException, ValueError) as error:  # what answers is no web server
        problem = f"{type(error).__name__} {first_line(error)}".strip()
    proxy = " through the proxy of https_proxy" if "https" in getproxies() else ""
    return f"; {address}{proxy} does not answer as a web server does ({problem})"


def text_files(splits: Mapping[str, Mapping]) -> dict[str, bytes]:
    """Return one text file a split: name -> content."""
    files = {}
    for split, rows in splits.items():
        # An empty line of the text is an empty string in the hub's rows.
        lines = [line if line.endswith("\n") else line + "\n" for line in rows["text"]]
        files[f"{split}.txt"] = "".join(lines).encode()
    return files


def image_files(splits: Mapping[str, Mapping]) -> dict[str, bytes]:
    """Return MNIST's four idx files: name -> content.

    Raises:
        ValueError: the images are not grey, or not all of one size.
    """
    files = {}
    for split, start in images.FILES.items():
        pixels = np.stack([np.asarray(image) for image in splits[split]["image"]])
        if pixels.dtype != np.uint8 or pixels.ndim != 3:
            raise ValueError(f"the {split} images are {pixels.shape} {pixels.dtype}, not grey")
        labels = np.array(list(splits[split]["label"]), dtype=np.uint8)
        files[f"{start}-images-idx3-ubyte"] = images.idx_file(torch.from_numpy(pixels))
        files[f"{start}-labels-idx1-ubyte"] = images.idx_file(torch.from_numpy(labels))
    return files


def _store(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files; the folder appears only when all are whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        whole = Path(partial) / folder.name
        whole.mkdir()
        for name, content in files.items():
            (whole / name).write_bytes(content)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another one that fetched the same was quicker.


if __name__ == "__main__":
    command_line(main, Config)
